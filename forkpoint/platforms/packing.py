"""Packing many small arrays into one buffer, so that one copy uploads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, Tensor]

_ALIGN = 16  # bytes


def places_of(arrays: Arrays) -> tuple[list[int], int]:
    """Return the byte offset of each array in the buffer, and the buffer's size in bytes."""
    sizes = (-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())
    *offsets, size = itertools.accumulate(sizes, initial=0)
    return offsets, size


def views(data: Tensor, arrays: Arrays, offsets: Sequence[int]) -> Tensors:
    """Return the arrays of a packed buffer as tensor views."""
    found: Tensors = {}
    for (name, array), offset in zip(arrays.items(), offsets, strict=True):
        like = torch.from_numpy(array)
        found[name] = data[offset : offset + array.nbytes].view(like.dtype).view(like.shape)
    return found

"""Packing many small arrays into one buffer, so that one copy uploads them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, Tensor]

_ALIGN = 16  # bytes


def places_of(arrays: Arrays) -> tuple[dict[str, int], int]:
    """Return each array's offset in one buffer that holds all of them, and the buffer's size, in bytes."""
    sizes = (-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())
    *offsets, size = itertools.accumulate(sizes, initial=0)
    return dict(zip(arrays, offsets, strict=True)), size


def views(data: Tensor, arrays: Arrays, offsets: Mapping[str, int]) -> Tensors:
    """Return a tensor of each array's dtype and shape over the bytes of `data` (uint8) at its offset, in bytes."""
    found: Tensors = {}
    for name, array in arrays.items():
        like, offset = torch.from_numpy(array), offsets[name]
        found[name] = data[offset : offset + array.nbytes].view(like.dtype).view(like.shape)
    return found

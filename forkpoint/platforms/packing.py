"""Many small arrays as one."""

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
    """Where each of them starts if they lie end to end in their order, and what they take: in bytes."""
    sizes = (-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())
    *offsets, size = itertools.accumulate(sizes, initial=0)
    return offsets, size


def views(data: Tensor, arrays: Arrays, offsets: Sequence[int]) -> Tensors:
    """Of bytes in which such arrays lie, each as a tensor."""
    found: Tensors = {}
    for (name, array), offset in zip(arrays.items(), offsets, strict=True):
        like = torch.from_numpy(array)
        found[name] = data[offset : offset + array.nbytes].view(like.dtype).view(like.shape)
    return found

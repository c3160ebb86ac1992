"""Many small arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.platforms.platform import Mark, Platform

Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, Tensor]

_ALIGN = 16  # bytes
_NUM_STAGED = 3  # steps whose inputs may still wait to be copied: two in flight and the one being made


@dataclass(frozen=True, slots=True)
class Field:
    """Where an array lies among others, in bytes."""

    name: str
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class InputRegion:
    """Device memory that recorded steps read their inputs from, and staged copies of it on the host."""

    def __init__(self, platform: Platform, capacity: int) -> None:
        self._platform = platform
        self._device = torch.zeros(capacity, dtype=torch.uint8, device=platform.device)
        self._staged = [platform.host_buffer((capacity,), torch.uint8) for _ in range(_NUM_STAGED)]
        self._views = [buffer.numpy().data for buffer in self._staged]
        self._copied: list[Mark | None] = [None] * _NUM_STAGED
        self._turn = 0

    def fill(self, arrays: Arrays, offsets: Sequence[int]) -> None:
        """Copy the arrays to their places; only the last may be shorter than its place."""
        self._turn = (self._turn + 1) % _NUM_STAGED
        mark = self._copied[self._turn]
        if mark is not None:
            mark.synchronize()
        view, end = self._views[self._turn], 0
        for array, offset in zip(arrays.values(), offsets, strict=True):
            end = offset + array.nbytes
            view[offset:end] = array.tobytes()
        self._device[:end].copy_(self._staged[self._turn][:end], non_blocking=True)
        self._copied[self._turn] = self._platform.mark()

    def tensors(self, fields: Sequence[Field]) -> Tensors:
        """Views of the region, which show what was filled in last."""
        return _views(self._device, fields)


def layout_of(arrays: Arrays) -> tuple[Field, ...]:
    """Arrays end to end, in their order."""
    fields, offset = [], 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array).dtype
        fields.append(Field(name, offset, array.nbytes, dtype, array.shape))
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    return tuple(fields)


def upload_all(platform: Platform, arrays: Arrays) -> Tensors:
    """The arrays on the device."""
    if platform.shares_memory:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    fields = layout_of(arrays)
    packed = np.empty(fields[-1].offset + fields[-1].num_bytes, np.uint8)
    for field, array in zip(fields, arrays.values(), strict=True):
        packed[field.offset : field.offset + field.num_bytes] = array.reshape(-1).view(np.uint8)
    return _views(platform.upload(packed), fields)


def _views(data: Tensor, fields: Sequence[Field]) -> Tensors:
    return {f.name: data[f.offset : f.offset + f.num_bytes].view(f.dtype).view(f.shape) for f in fields}

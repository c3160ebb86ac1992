"""Buffers of the device that units pass through, between the arena and memory of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.runtime.stretch import Stretch


class DeviceBuffers:
    """Hands out memory for units, from buffers that are allocated for many units at once."""

    def __init__(self, buffer_bytes: int, padding: int) -> None:
        """`padding` bytes stay free after each unit, so that units are as far apart as in the arena and on the host."""
        self._buffer_bytes, self._padding = buffer_bytes, padding
        self._rest = Stretch.of(torch.empty(0, dtype=torch.uint8))  # the free part of the last buffer

    def take(self, num_bytes: int, allocate: Callable[[int], Tensor]) -> Stretch:
        """Return memory for a unit, of a new buffer if the last one has no room for it."""
        taken = num_bytes + self._padding
        if self._rest.num_bytes < taken:
            self._rest = Stretch.of(allocate(max(taken, self._buffer_bytes)))
        memory, start, end = self._rest
        self._rest = Stretch(memory, start + taken, end)
        return Stretch(memory, start, start + num_bytes)

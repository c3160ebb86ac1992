"""The arena's bytes: one buffer, seen by each layer through strided views."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout, KVSpec, StateSpec
from forkpoint.models.context import KVCache, StateCache
from forkpoint.sched.plan import Move, MoveKind

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ArenaBuffer:
    """Owns `num_pages * layout.page_bytes` bytes, uninitialised.

    `kv[i]` are the keys and values of the i-th attention layer, `[blocks, Hkv, block_size, D]`; `states[i]`
    the i-th recurrent layer's conv pool `[slots, W-1, D]` and matrix pool `[slots, HV, V, K]` (`[slots, 0]`
    where a layer has none). All are strided views: a block or slot of one layer is followed by those of the
    next.
    """

    def __init__(self, layout: CacheLayout, num_pages: int, device: torch.device | None = None) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.data = torch.empty(num_pages * layout.page_bytes, dtype=torch.uint8, device=device)
        self.kv = tuple(self._kv_views())
        self.states = tuple(self._state_views())

    @property
    def num_blocks(self) -> int:
        return self.num_pages * self.layout.blocks_per_page

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.layout.slots_per_page

    def move(self, moves: Sequence[Move]) -> int:
        """Copy whole blocks and slots, in order. Returns the bytes moved."""
        moved_bytes = 0
        for move in moves:
            is_block = move.kind is MoveKind.BLOCK
            stride = self.layout.block_stride_bytes if is_block else self.layout.slot_stride_bytes
            size = self.layout.block_bytes if is_block else self.layout.slot_bytes
            src, dst = move.src * stride, move.dst * stride
            self.data[dst : dst + size].copy_(self.data[src : src + size])
            moved_bytes += size
        return moved_bytes

    def _kv_views(self) -> list[KVCache]:
        views, offset = [], 0
        for spec in self.layout.kv:
            views.append(self._kv_view(spec, offset))
            offset += spec.block_bytes(self.layout.block_size)
        return views

    def _kv_view(self, spec: KVSpec, offset: int) -> KVCache:
        size, stride = self.layout.block_size, self.layout.block_stride_bytes
        key_shape = (spec.num_heads, size, spec.key_dim)
        value_shape = (spec.num_heads, size, spec.value_dim)
        value_offset = offset + spec.key_bytes(size)
        return KVCache(
            self._view(self.num_blocks, key_shape, spec.dtype, stride, offset),
            self._view(self.num_blocks, value_shape, spec.dtype, stride, value_offset),
        )

    def _state_views(self) -> list[StateCache]:
        views, offset = [], 0
        for spec in self.layout.states:
            views.append(self._state_view(spec, offset))
            offset += spec.slot_bytes
        return views

    def _state_view(self, spec: StateSpec, offset: int) -> StateCache:
        stride = self.layout.slot_stride_bytes
        matrix_offset = offset + spec.conv_bytes
        return StateCache(
            self._view(self.num_slots, spec.conv_shape, spec.conv_dtype, stride, offset),
            self._view(self.num_slots, spec.matrix_shape, spec.matrix_dtype, stride, matrix_offset),
        )

    def _view(self, count: int, shape: tuple[int, ...], dtype: str, stride_bytes: int, offset_bytes: int) -> Tensor:
        """`[count, *shape]`, each entry contiguous, entry `i` at byte `i * stride_bytes + offset_bytes`."""
        kind = _DTYPES[dtype]
        if not shape:
            return torch.empty((count, 0), dtype=kind, device=self.data.device)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        outer = stride_bytes // kind.itemsize
        return self.data.view(kind).as_strided((count, *shape), (outer, *strides), offset_bytes // kind.itemsize)

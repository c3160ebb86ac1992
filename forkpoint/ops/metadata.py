"""Index tensors of one step, built once on the host and shared by all layers.

Row order is the same everywhere: decode rows first, then prefill segments. Slot `-1` as `src` is the zero
state; `-1` as `dst` stores nothing. Index tensors are int32 unless said; host copies spare a device sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 64  # tokens of one row that a tiled kernel takes at a time


def tile_table(lens: Sequence[int], device: torch.device, first_row: int = 0) -> Tensor:
    """`[NT, 2]` int32: (row, offset of its first token in the row) of every 64-token tile of rows of `lens` tokens."""
    tiles = [(first_row + n, offset) for n, length in enumerate(lens) for offset in range(0, length, TILE)]
    table = torch.tensor(tiles, dtype=torch.int32).view(-1, 2)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Slots of the `B` one-token rows: each reads `src[b]` and writes `dst[b]` (equal in steady decode)."""

    src: Tensor  # [B]
    dst: Tensor  # [B]

    def __len__(self) -> int:
        return int(self.src.shape[0])


@dataclass(frozen=True)
class SegmentIndex:
    """`N` prefill segments of lengths `lens`, laid end to end.

    Segment `n` reads its initial state from slot `src[n]` and writes its final state to `dst[n]`. Its exports
    are entries `[exp_ptr[n], exp_ptr[n+1])`: after `exp_pos[e]` tokens of the segment (1 <= exp_pos <= len,
    ascending, a multiple of 64 from the segment's start unless it is the segment's length) the state also
    goes to slot `exp_dst[e]`. Within one launch no slot is written twice, and no slot that a row reads is
    written by another row or by an export.
    """

    cu_seqlens: Tensor  # [N + 1]
    src: Tensor  # [N]
    dst: Tensor  # [N]
    exp_ptr: Tensor  # [N + 1]
    exp_pos: Tensor  # [E]
    exp_dst: Tensor  # [E]
    lens: tuple[int, ...]  # host copy

    def __len__(self) -> int:
        return len(self.lens)

    @cached_property
    def tiles(self) -> Tensor:
        """`[NT, 2]`: see `tile_table`. Made at its first use, for kernels that run over tiles."""
        return tile_table(self.lens, self.cu_seqlens.device)


@dataclass(frozen=True)
class AttentionIndex:
    """Where this step's `T` tokens of `N` rows go, and what each row attends to.

    Row `r` owns queries `[cu_queries[r], cu_queries[r+1])`, the last of its `kv_lens[r]` tokens; block `i` of
    its tokens is `block_table[r, i]`. The first `num_decodes` rows have one query each. `slot_mapping[t]` =
    block * block_size + offset of token `t`, or -1 for a token that is stored elsewhere or not at all.
    """

    num_decodes: int
    cu_queries: Tensor  # [N + 1]
    kv_lens: Tensor  # [N]
    block_table: Tensor  # [N, max_blocks]
    slot_mapping: Tensor  # [T] int64
    query_lens: tuple[int, ...]  # host copies
    host_kv_lens: tuple[int, ...]

    @cached_property
    def tiles(self) -> Tensor:
        """`[NT, 2]`: the tiles of the rows behind the decodes, see `tile_table`. Made at its first use."""
        return tile_table(self.query_lens[self.num_decodes :], self.cu_queries.device, self.num_decodes)

"""Index tensors of one step, built once on the host and shared by all layers.

Row order is the same everywhere: decode rows first, then prefill segments. Slot `-1` as `src` is the zero
state; `-1` as `dst` stores nothing. Index tensors are int32 unless said; host copies spare a device sync.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Slots of the `B` one-token rows: each reads `src[b]` and writes `dst[b]` (equal in steady decode)."""

    src: Tensor  # [B]
    dst: Tensor  # [B]

    def __len__(self) -> int:
        return int(self.src.shape[0])


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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

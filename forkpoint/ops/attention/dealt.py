"""Attention over keys that are dealt to the ranks of a group (decode context parallelism).

Decode rows exchange partial results: each rank attends with the queries of all ranks to the keys that it keeps, and
each rank merges the outputs of its own heads by the logarithms of their sums of exponentials. Prompts exchange keys
instead: each rank gathers the keys of a row and attends with its own queries. A prompt's partial outputs are larger
than its keys, and gathered keys give every operator, and its bits, what one device has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.metadata import AttentionIndex, DealtIndex, GatheredRows
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.table import OpTable


def attend(
    ops: OpTable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: AttentionIndex,
    scale: float,
    window: int | None,
    gate: Tensor | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Return what `paged_attention` returns, also if the keys are dealt: `q[T, Hq, D] -> [T, Hq, Dv]`."""
    dealt = index.dealt
    if dealt is None:
        return ops.paged_attention(q, k_cache, v_cache, index, scale, window, gate, scales)

    def whole(rows: GatheredRows) -> Tensor:
        k, v = (gather_keys(cache, rows, dealt) for cache in (k_cache, v_cache))
        own: KVScales | None = None
        if scales is not None:
            own = KVScales(*(gather_keys(scale, rows, dealt) for scale in (scales.k, scales.v)))
        of_rows = None if gate is None else gate[rows.tokens]
        return ops.paged_attention(q[rows.tokens], k, v, rows.index, scale, window, of_rows, own)

    def part(count: int) -> Tensor:
        out = attend_parts(ops, q[:count], k_cache, v_cache, dealt, scale, window, scales)
        return out if gate is None else sigmoid_mul(out, torch.unflatten(gate[:count], 1, out.shape[1:]))

    return joined(dealt, part, whole)


def joined(dealt: DealtIndex, part: Callable[[int], Tensor], whole: Callable[[GatheredRows], Tensor]) -> Tensor:
    """Return the outputs of all rows: `part` of so many decode rows, then `whole` for rows whose keys are gathered."""
    pieces = [whole(rows) for rows in dealt.gathered]
    if dealt.local is not None:
        pieces.insert(0, part(dealt.local.num_decodes))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def attend_parts(
    ops: OpTable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    dealt: DealtIndex,
    scale: float,
    window: int | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Return attention of decode rows, `q[N, Hq, D] -> [N, Hq, Dv]`, over the keys of all ranks of the group.

    The caches have one KV head, which the group's ranks share. Each rank has other query heads.
    """
    index, ranks = dealt.local, dealt.ranks
    assert index is not None and k_cache.shape[1] == 1, "ranks share keys only if each has one KV head"
    every = ranks.gather_heads(q)  # [M, ranks, heads of each, D]
    starts = None if window is None else dealt.first_keys(window)
    found = ops.partial_attention(every.view(len(q), -1, q.shape[2]), k_cache, v_cache, index, scale, starts, scales)
    return ranks.merge_heads(found.view(*every.shape[:3], -1), q).view(*q.shape[:2], -1)


def gather_keys(cache: Tensor, rows: GatheredRows, dealt: DealtIndex) -> Tensor:
    """Return the rows' keys from all ranks' `cache[P, H, kernel block size, D]`: `[B, H, rows.block_size, D]`."""
    blocks = torch.unflatten(cache[rows.blocks], 0, (-1, rows.ratio))
    own = blocks.transpose(1, 2).flatten(2, 3)  # [B, H, tokens of a rank, D]
    every = dealt.ranks.stack(own.contiguous().view(torch.uint8)).view(cache.dtype)
    runs = torch.unflatten(every, 3, (-1, dealt.deal.interleave))  # [ranks, B, H, runs, tokens of a run, D]
    whole = torch.unflatten(runs.permute(1, 2, 3, 0, 4, 5).flatten(2, 4), 2, (-1, rows.block_size))
    gathered: Tensor = whole.transpose(1, 2).flatten(0, 1)
    return gathered.contiguous()

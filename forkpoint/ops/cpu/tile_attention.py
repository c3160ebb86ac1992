"""Attention of prompts on a machine with bf16 matrix tiles (AMX), which torch's operator uses and ours does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forkpoint.config import BLOCK_SIZE
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.table import PagedAttention

LEAST_QUERIES: Final = 128  # a row with fewer queries would spend too much of its time on collecting its keys


def has_matrix_tiles() -> bool:
    """Return whether the processor multiplies bf16 matrices in hardware tiles, many times faster than fp32 vectors."""
    return bool(torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True, slots=True)
class TileAttention:
    """Uses torch's operator for rows with many queries, and `few` for other rows, layers with windows and 8-bit keys.

    The two operators round differently, so a row's bits depend on how its prompt was cut; deterministic tables do not
    use this.
    """

    few: PagedAttention
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        window: int | None,
        gate: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Attend (`table.PagedAttention`)."""
        lens = index.query_lens
        takes = q.dtype == torch.bfloat16 and window is None and scales is None and q.shape[2] == v_cache.shape[3]
        if not takes or max(lens, default=0) < LEAST_QUERIES:
            return self.few(q, k_cache, v_cache, index, scale, window, gate, scales)
        found, end = list[Tensor](), 0
        # each long row is a group of its own, and short rows next to each other are one
        for long_row, group in groupby(range(len(lens)), lambda row: row if lens[row] >= LEAST_QUERIES else None):
            rows = list(group)
            part = index.part(rows[0], rows[-1] + 1)
            start, end = end, end + sum(part.query_lens)
            if long_row is None:
                found.append(self.few(q[start:end], k_cache, v_cache, part, scale, window))
            else:
                found.append(_attend(q[start:end], k_cache, v_cache, part, scale))
        found.append(q.new_zeros(len(q) - end, *q.shape[1:]))  # padding
        out = torch.cat(found)
        if gate is not None:
            out = self.sigmoid_mul(out.flatten(1), gate).view(out.shape)
        return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, scale: float) -> Tensor:
    """Attend with the queries `q[T, Hq, D]` of the only row of `index`.

    torch's operator can mask only a square, so one call attends to the queries' own keys and one to the keys before
    them. The sums of exponentials merge both results. Queries and their own keys are padded to whole blocks, because
    torch generates and keeps code for each number of queries. Only the padding sees the padded keys.
    """
    (count, heads, dim), (num_keys,) = q.shape, index.host_kv_lens
    size, shared = k_cache.shape[2], k_cache.shape[1]
    blocks = index.block_table[index.table_rows[0], : -(-num_keys // size)].long()
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_keys] for cache in (k_cache, v_cache))
    group, before, padding = heads // shared, num_keys - count, (0, 0, 0, -count % BLOCK_SIZE)
    queries = pad(q.transpose(0, 1)[None], padding)
    own_k, own_v = (pad(x[:, :, before:], padding).repeat_interleave(group, 1) for x in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = attend(queries, own_k, own_v, 0.0, True, scale=scale)
    if before:
        joined = queries.reshape(1, shared, -1, dim)  # heads that share keys are more queries of one head
        earlier, earlier_sums = attend(joined, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scale)
        share = (earlier_sums.reshape(log_sums.shape) - log_sums).sigmoid().unsqueeze(-1)
        out = torch.lerp(out.float(), earlier.reshape(out.shape).float(), share)
    merged: Tensor = out[0, :, :count].transpose(0, 1).to(q.dtype)
    return merged

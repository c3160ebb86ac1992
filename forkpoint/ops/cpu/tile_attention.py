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

LEAST_QUERIES: Final = 128  # of a row; with fewer, collecting its keys would take too large a share of the time


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
        found, start, end = list[Tensor](), 0, 0
        for is_long, group in groupby(range(len(lens)), lambda row: lens[row] >= LEAST_QUERIES):
            rows = list(group)
            for first, last in [(row, row) for row in rows] if is_long else [(rows[0], rows[-1])]:
                part = index.part(first, last + 1)
                start, end = end, end + sum(part.query_lens)
                if is_long:
                    found.append(_attend(q[start:end], k_cache, v_cache, part, scale))
                else:
                    found.append(self.few(q[start:end], k_cache, v_cache, part, scale, window))
        found.append(q.new_zeros(len(q) - end, *q.shape[1:]))  # padding
        out = torch.cat(found)
        if gate is not None:
            out = self.sigmoid_mul(out.flatten(1), gate).view(out.shape)
        return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, scale: float) -> Tensor:
    """Attend with the queries `q[T, Hq, D]` of the only row of `index`.

    torch's operator is causal only from the first key on. So the keys before the queries and those of the queries are
    two calls, whose results are merged by their sums of exponentials. Queries are padded to whole blocks, because torch
    generates and keeps code for each number of them; their keys too, which only the padding sees.
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

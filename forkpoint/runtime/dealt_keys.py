"""The indexes of a step's rows whose keys are dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from forkpoint.config import BLOCK_SIZE
from forkpoint.ops.deal import Deal
from forkpoint.ops.metadata import (
    AttentionIndex,
    AttentionWork,
    DealtIndex,
    GatheredRows,
    KeySplits,
    ranges,
    tile_table,
)
from forkpoint.ops.ranks import Ranks
from forkpoint.platforms.packing import Arrays
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.block_table import BlockTable
from forkpoint.sched.plan import IntArray

MOST_GATHERED: Final = 1 << 17  # tokens whose keys are gathered at a time, unless one row has more
# Lengths of queries and of keys of all rows, decodes first; empty if only the device has them.
HostLens = tuple[tuple[int, ...], tuple[int, ...]]


class DealtKeys:
    """Completes the index of a step's rows, whose keys the ranks of a group keep in turn.

    If `ranks.gathers`, keys are gathered for all rows, so that each row has the bits of one device. Otherwise the keys
    of decode rows stay where they are.
    """

    def __init__(
        self, ranks: Ranks, interleave: int, block_size: int, platform: Platform, splits: KeySplits | None
    ) -> None:
        """Attention reads gathered keys in blocks of `block_size` tokens.

        `splits` makes the work lists for gathered keys of decode rows; None: the operators need no lists.
        """
        self.deal, self._block_size = Deal(ranks.rank, ranks.size, interleave), block_size
        self._ranks, self._platform, self._splits = ranks, platform, splits

    def complete(self, index: AttentionIndex, table: BlockTable, most: HostLens) -> AttentionIndex:
        """Return the index with `dealt`.

        `most` are the lengths of all rows on the host, or upper bounds if drafts in flight may be rejected. A step of
        decode rows that are not gathered does not need them.
        """
        decodes = index.num_decodes
        first, local = 0, None
        if not self._ranks.gathers:
            first, local = decodes, self._local(index)
        gathered = tuple(self._gathered(index, table, most, *rows) for rows in self._groups(most, first))
        return replace(index, dealt=DealtIndex(self.deal, self._ranks, index.kv_lens[:decodes], local, gathered))

    def _local(self, index: AttentionIndex) -> AttentionIndex | None:
        count = index.num_decodes
        if not count:
            return None
        host_lens: tuple[int, ...] = ()
        if index.query_lens:
            host_lens = tuple(self.deal.count(np.asarray(index.host_kv_lens[:count])).tolist())
        return replace(
            index.part(0, count),
            cu_queries=index.cu_queries[: count + 1],  # a view, which needs no launch
            kv_lens=self.deal.count(index.kv_lens[:count]),
            host_kv_lens=host_lens,
            first_key=int(self.deal.count(np.asarray(index.first_key))),
            work=index.work,
        )

    def _groups(self, most: HostLens, first: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows from `first` on that together have at most MOST_GATHERED keys, or are one row."""
        total, end = 0, first
        for end, num_keys in enumerate(most[1][first:], first):
            if total and total + num_keys > MOST_GATHERED:
                yield first, end
                first, total = end, 0
            total += num_keys
        if total:
            yield first, end + 1

    def _gathered(self, index: AttentionIndex, table: BlockTable, most: HostLens, first: int, end: int) -> GatheredRows:
        query_lens, kv_lens = (np.asarray(lens[first:end], np.int32) for lens in most)
        decodes = min(max(0, index.num_decodes - first), end - first)
        start, pieces = sum(most[0][:first]), BLOCK_SIZE // self._block_size
        counts = -(-kv_lens // BLOCK_SIZE)
        blocks = np.zeros((end - first, int(counts.max()) * pieces), np.int32)
        used = np.arange(blocks.shape[1]) < (counts * pieces)[:, None]
        blocks[used] = np.arange(int(counts.sum()) * pieces)
        rows = np.repeat(np.arange(first, end), counts * table.ratio)
        columns = ranges(np.zeros_like(counts), counts * table.ratio)
        lists: Arrays = {"blocks": blocks, "rows": rows.astype(np.int64), "columns": columns}
        on_device = self._platform.upload_all(lists)
        exact = index.query_lens != ()
        own = AttentionIndex(
            decodes,
            index.cu_queries[first : end + 1] - start,
            index.kv_lens[first:end],
            on_device["blocks"],
            torch.arange(end - first, dtype=torch.int32, device=index.kv_lens.device),
            index.key_places,
            index.query_lens[first:end],
            tuple(kv_lens.tolist()) if exact else (),
            self._work(query_lens, kv_lens, decodes),
            index.first_key,
        )
        lines = index.table_rows[on_device["rows"]].long()
        own_blocks = table.device[lines, on_device["columns"]].long()
        return GatheredRows(slice(start, start + int(query_lens.sum())), own_blocks, table.ratio, self._block_size, own)

    def _work(self, query_lens: IntArray, kv_lens: IntArray, decodes: int) -> AttentionWork | None:
        if self._splits is None:
            return None
        parts, pointers = self._splits.table(kv_lens[:decodes])
        lists: Arrays = {"tiles": tile_table(query_lens[decodes:], decodes), "parts": parts, "part_ptr": pointers}
        found = self._platform.upload_all(lists)
        return AttentionWork(found["tiles"], found["parts"], found["part_ptr"])

"""What the runner remembers of each row, and the index tensors of a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.models.context import ForwardContext, StateIndex
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, SegmentIndex
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.platform import Platform
from forkpoint.runtime.row_sampling import RowSampling
from forkpoint.sched.plan import LAST_SAMPLED, NO_BLOCK, AddedRow, IntArray, StepPlan


class Batch:
    """The rows of the running batch: known ids, block table, last sampled id, how each samples."""

    def __init__(
        self, layout: CacheLayout, num_rows: int, max_model_len: int, vocab_size: int, platform: Platform
    ) -> None:
        self.vocab_size = vocab_size
        self.platform = platform
        blocks = layout.num_blocks_for(max_model_len)
        self.table = BlockTable(num_rows, blocks, layout.block_size, platform=platform)
        self.last_sampled = torch.zeros(num_rows, dtype=torch.int64, device=platform.device)
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self._has_kv = layout.has_kv
        self._rows: dict[int, AddedRow] = {}
        self._sampling: dict[int, RowSampling] = {}

    def row(self, row: int) -> AddedRow:
        return self._rows[row]

    def sampling(self, rows: IntArray) -> list[RowSampling]:
        return [self._sampling[row] for row in rows.tolist()]

    def update(self, plan: StepPlan) -> None:
        """Remove, remap, add and replace rows, then give rows their new blocks."""
        for row in plan.removed:
            del self._rows[row], self._sampling[row]
            self.table.clear_row(row)
        if plan.moves:
            self.table.remap(plan.moves)
        for added in plan.added:
            self._rows[added.row] = added
            self.num_prompt_tokens[added.row] = added.num_prompt_tokens
            self._sampling[added.row] = RowSampling.create(added, self.vocab_size, self.platform.device)
            self.table.add(added.row, added.block_ids)
        for replaced in plan.replaced:
            self.table.add(replaced.row, replaced.block_ids)
        fresh = plan.decodes.new_blocks != NO_BLOCK
        if fresh.any():
            self.table.append_each(plan.decodes.rows[fresh], plan.decodes.new_blocks[fresh])
        for chunk in plan.chunks:
            if len(chunk.new_blocks):
                self.table.append(chunk.row, chunk.new_blocks)

    def record(self, rows: IntArray, token_ids: Tensor) -> None:
        """The rows' newly sampled ids, `[N]` int64."""
        self.last_sampled[torch.from_numpy(rows.astype(np.int64)).to(self.platform.device)] = token_ids
        for i, sampling in enumerate(self.sampling(rows)):
            if sampling.counts is not None:
                sampling.counts.outputs[token_ids[i]] += 1

    def token_ids(self, plan: StepPlan) -> Tensor:
        """`[T]` int64: decode rows' tokens, then the chunks'."""
        decodes = plan.decodes
        parts = [decodes.tokens, *(self._rows[c.row].token_ids[c.start : c.end] for c in plan.chunks)]
        ids = self.platform.upload(np.concatenate(parts).astype(np.int64))
        if len(decodes):
            rows = self.platform.upload(decodes.rows.astype(np.int64))
            head = ids[: len(decodes)]
            head.copy_(torch.where(head == LAST_SAMPLED, self.last_sampled[rows], head))
        return ids

    def context(self, plan: StepPlan, arena: ArenaBuffer) -> ForwardContext:
        """Index tensors for a plan whose rows are up to date. `conv` and `matrix` are the same object."""
        upload, decodes, chunks = self.platform.upload, plan.decodes, plan.chunks
        num_decodes = len(decodes)
        ends = np.fromiter((c.end for c in chunks), np.int32, len(chunks))
        starts = np.fromiter((c.start for c in chunks), np.int32, len(chunks))
        lens = np.concatenate([np.ones(num_decodes, np.int32), ends - starts])
        cu_queries = _running_total(lens)
        kv_lens = np.concatenate([decodes.starts + 1, ends]).astype(np.int32)
        rows = np.concatenate([decodes.rows, np.fromiter((c.row for c in chunks), np.int32, len(chunks))])
        positions = np.repeat(kv_lens - lens - cu_queries[:-1], lens).astype(np.int64)
        positions += np.arange(len(positions))
        if self._has_kv:
            slots = self.table.slot_mapping(np.repeat(rows, lens), positions)
            table = self.table.commit(rows)
        else:
            slots, table = np.full(len(positions), -1, np.int64), upload(np.zeros((len(rows), 1), np.int32))
        attention = AttentionIndex(
            num_decodes,
            upload(cu_queries),
            upload(kv_lens),
            table,
            upload(slots),
            tuple(lens.tolist()),
            tuple(kv_lens.tolist()),
        )
        states = StateIndex(DecodeIndex(upload(decodes.read_slots), upload(decodes.write_slots)), self._segments(plan))
        return ForwardContext(upload(positions), num_decodes, attention, states, states, arena.kv, arena.states)

    def _segments(self, plan: StepPlan) -> SegmentIndex:
        upload, chunks = self.platform.upload, plan.chunks
        lens = [c.end - c.start for c in chunks]
        saves = [(save.num_tokens - c.start, save.slot) for c in chunks for save in c.saves]
        exports = np.asarray(saves, np.int32).reshape(len(saves), 2)
        slots = np.asarray([(c.read_slot, c.write_slot) for c in chunks], np.int32).reshape(len(chunks), 2)
        return SegmentIndex(
            upload(_running_total(np.asarray(lens, np.int32))),
            upload(slots[:, 0].copy()),
            upload(slots[:, 1].copy()),
            upload(_running_total(np.asarray([len(c.saves) for c in chunks], np.int32))),
            upload(exports[:, 0].copy()),
            upload(exports[:, 1].copy()),
            tuple(lens),
        )


def _running_total(lens: IntArray) -> IntArray:
    """`[n + 1]`: 0, then the sums of the first 1, 2, .. n."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    return out

"""A plan under construction. It holds requests, not ids: ids are read off at the end, after all moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forkpoint.cache.arena import UnitMove
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Provenance
from forkpoint.sched.entry import Entry, IssuedStep
from forkpoint.sched.plan import (
    LAST_SAMPLED,
    NO_BLOCK,
    AddedRow,
    Chunk,
    DecodeColumns,
    IntArray,
    Move,
    MoveKind,
    ReplacedPrefix,
    StateSave,
    StepPlan,
    TokenMasks,
)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    entry: Entry
    start: int
    end: int
    samples: bool


class PlanBuilder:
    """Collects one step's work, then turns it into a StepPlan and publishes what the plan computes."""

    def __init__(self, step: int, budget: int, manager: CacheManager) -> None:
        self.step = step
        self.budget = budget
        self._manager = manager
        self._added: list[Entry] = []
        self._replaced: dict[Entry, None] = {}
        self._decodes: list[tuple[Entry, int, bool]] = []  # entry, token, samples
        self._steady: list[Entry] = []
        self._chunks: list[PlannedChunk] = []

    @property
    def is_empty(self) -> bool:
        return not (self._steady or self._decodes or self._chunks)

    def add_row(self, entry: Entry) -> None:
        self._added.append(entry)

    def replace_prefix(self, entry: Entry) -> None:
        """The row's table is to be told anew, up to the blocks that it has been told."""
        self._replaced[entry] = None

    def add_decode(self, entry: Entry, token: int, samples: bool) -> None:
        self._decodes.append((entry, token, samples))
        self.budget -= 1

    def add_steady(self, entries: list[Entry]) -> None:
        """Decodes in mid-block of rows that have decoded before: nothing is allocated, read = write slot."""
        self._steady += entries
        self.budget -= len(entries)

    def add_chunk(self, entry: Entry, start: int, end: int, samples: bool) -> None:
        self._chunks.append(PlannedChunk(entry, start, end, samples))
        self.budget -= end - start

    def finish(self, removed: tuple[int, ...]) -> tuple[StepPlan, IssuedStep]:
        """The plan, and the record to settle it by. Entries and leases advance past the plan's chunks."""
        moves = tuple(_as_move(move) for move in self._manager.finish_plan())
        added = tuple(self._make_row(entry) for entry in self._added)
        replaced = tuple(ReplacedPrefix(entry.row, _told_blocks(entry)) for entry in self._replaced)
        issued = IssuedStep(self.step, [], [])
        decodes = self._make_decodes(issued)
        chunks = tuple(self._make_chunk(planned, issued) for planned in self._chunks)
        for planned in self._chunks:
            self._manager.publish(planned.entry.lease, planned.end, Provenance.PREFILL)
        issued.made = self._manager.drain_filed()
        plan = StepPlan(self.step, removed, moves, added, replaced, decodes, chunks, _token_masks(issued.sampled))
        return plan, issued

    def _make_row(self, entry: Entry) -> AddedRow:
        request = entry.request
        return AddedRow(
            row=entry.row,
            request_id=request.id,
            token_ids=request.all_token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
            block_ids=_told_blocks(entry),
            wants_prompt_logprobs=request.wants_prompt_logprobs,
        )

    def _make_decodes(self, issued: IssuedStep) -> DecodeColumns:
        steady, others = self._steady, self._decodes
        if not steady and not others:
            return DecodeColumns.empty()
        columns = np.empty((6, len(steady) + len(others)), np.int32)
        samples = np.ones(columns.shape[1], np.bool_)
        if steady:
            columns[:, : len(steady)] = self._make_steady(issued)
        for i, (entry, token, sample) in enumerate(others, len(steady)):
            lease, block = entry.lease, NO_BLOCK
            if lease.num_told_blocks < lease.num_blocks:
                (block,) = lease.block_ids(lease.num_told_blocks, lease.num_blocks)
            start = entry.num_computed
            columns[:, i] = (entry.row, start, token, block, self._manager.read_slot(lease), lease.slot)
            samples[i] = sample
            self._settle_later(entry, start + 1, sample, Provenance.DECODE, issued)
        rows, starts, tokens, blocks, reads, writes = columns
        return DecodeColumns(rows, starts, tokens, blocks, reads, writes, samples)

    def _make_steady(self, issued: IssuedStep) -> IntArray:
        """The columns of the steady rows; the loops are this plain because there are hundreds of them."""
        steady = self._steady
        leases = [entry.lease for entry in steady]
        columns = np.empty((6, len(steady)), np.int32)
        columns[0] = [entry.row for entry in steady]
        columns[1] = [entry.num_computed for entry in steady]
        columns[2], columns[3] = LAST_SAMPLED, NO_BLOCK
        columns[4] = columns[5] = [lease.slot for lease in leases]
        for entry in steady:
            entry.num_computed += 1
            entry.num_planned_outputs += 1
        self._manager.advance_decodes(leases)
        issued.entries += steady
        issued.sampled += steady
        return columns

    def _make_chunk(self, planned: PlannedChunk, issued: IssuedStep) -> Chunk:
        entry, lease = planned.entry, planned.entry.lease
        chunk = Chunk(
            row=entry.row,
            start=planned.start,
            end=planned.end,
            new_blocks=np.asarray(lease.block_ids(lease.num_told_blocks, lease.num_blocks), np.int32),
            read_slot=self._manager.read_slot(lease),
            write_slot=lease.slot,
            saves=tuple(StateSave(save.num_tokens, save.slot) for save in lease.pending),
            samples=planned.samples,
        )
        self._settle_later(entry, planned.end, planned.samples, Provenance.PREFILL, issued)
        return chunk

    def _settle_later(self, entry: Entry, end: int, samples: bool, provenance: Provenance, issued: IssuedStep) -> None:
        entry.num_computed = end
        issued.entries.append(entry)
        if samples:
            entry.num_planned_outputs += 1
            issued.sampled.append(entry)
        reading = self._manager.advance(entry.lease, end, provenance)
        if reading is not None:
            issued.readers.append(reading)


def _token_masks(sampled: list[Entry]) -> TokenMasks | None:
    """The masks of the sampled rows, given in the order of `StepPlan.sampled_rows`, that have a grammar."""
    masks = [(i, entry.request.grammar.mask) for i, entry in enumerate(sampled) if entry.request.grammar is not None]
    if not masks:
        return None
    rows = np.asarray([i for i, _ in masks], np.int32)
    bits = [mask for _, mask in masks if mask is not None]
    assert len(bits) == len(masks), "a request whose output is whole was planned"
    return TokenMasks(rows, np.stack(bits))


def _told_blocks(entry: Entry) -> IntArray:
    return np.asarray(entry.lease.block_ids(0, entry.lease.num_told_blocks), np.int32)


def _as_move(move: UnitMove) -> Move:
    return Move(MoveKind.SLOT if move.is_slot else MoveKind.BLOCK, move.src, move.dst)


def replay_token(entry: Entry) -> int:
    """The token of the next decode chunk: known if an earlier run of the request sampled it."""
    if entry.num_computed >= entry.num_known:
        return LAST_SAMPLED
    return entry.request.output_token_ids[entry.num_computed - entry.request.num_prompt_tokens]

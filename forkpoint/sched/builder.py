"""A plan under construction. It holds requests, not ids: ids are read off at the end, after all moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Checkpoint
from forkpoint.sched.plan import LAST_SAMPLED, AddedRow, IntArray, ReplacedPrefix, StepPlan, StepRows, TokenMasks
from forkpoint.sched.scheduled_request import IssuedStep, ScheduledRequest


@dataclass(frozen=True, slots=True)
class _Work:
    """What one row is to compute; it starts where the plans before have taken it."""

    scheduled: ScheduledRequest
    tokens: IntArray
    decodes: bool  # through the decode kernels: what follows its first token are drafts
    masks: Sequence[IntArray] = ()  # of each position that is sampled, under a grammar

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - 1 if self.decodes else 0


class PlanBuilder:
    """Collects one step's work, then turns it into a StepPlan and publishes what the plan computes."""

    def __init__(self, step: int, budget: int, manager: CacheManager) -> None:
        self.step = step
        self.budget = budget
        self._manager = manager
        self._added: list[ScheduledRequest] = []
        self._replaced: dict[ScheduledRequest, None] = {}
        self._steady: list[ScheduledRequest] = []
        self._decodes: list[_Work] = []
        self._prefills: list[_Work] = []

    @property
    def num_rows(self) -> int:
        """Rows whose tokens were taken off the budget already."""
        return len(self._steady) + len(self._decodes) + len(self._prefills)

    def add_row(self, scheduled: ScheduledRequest) -> None:
        self._added.append(scheduled)

    def replace_prefix(self, scheduled: ScheduledRequest) -> None:
        """Resend the row's block table, up to the blocks that the worker already has."""
        self._replaced[scheduled] = None

    def add_steady(self, requests: list[ScheduledRequest]) -> None:
        """Decode steps in mid-block of rows that have decoded before: nothing is allocated, read = write slot."""
        self._steady += requests
        self.budget -= len(requests)

    def add_decode(
        self, scheduled: ScheduledRequest, drafts: IntArray | None = None, masks: Sequence[IntArray] = ()
    ) -> None:
        """The next token through the decode kernels: known if an earlier run of the request sampled it. `drafts` may
        follow it; under a grammar `masks` has what may come after each of them."""
        start, request = scheduled.lease.num_planned, scheduled.request
        tokens = (
            request.token_ids(start, start + 1)
            if start < scheduled.num_tokens_at_admission
            else np.full(1, LAST_SAMPLED, np.int32)
        )
        tokens = tokens if drafts is None else np.concatenate([tokens, drafts])
        self._add(scheduled, tokens, masks, decodes=True)

    def add_prefill(self, scheduled: ScheduledRequest, end: int) -> None:
        """Known tokens up to `end` through the prefill kernels."""
        self._add(scheduled, scheduled.request.token_ids(scheduled.lease.num_planned, end), (), decodes=False)

    def _add(self, scheduled: ScheduledRequest, tokens: IntArray, masks: Sequence[IntArray], *, decodes: bool) -> None:
        mask = scheduled.request.grammar.mask if scheduled.request.grammar is not None else None
        scheduled.last_step = self.step
        work = _Work(scheduled, tokens, decodes, (mask, *masks) if mask is not None else ())
        (self._decodes if decodes else self._prefills).append(work)
        self.budget -= len(tokens)

    def finish(self, removed: tuple[int, ...]) -> IssuedStep:
        """The plan, in the record to settle it by. The leases' planned tokens advance past it."""
        added = tuple(self._make_row(scheduled) for scheduled in self._added)
        replaced = tuple(ReplacedPrefix(scheduled.row, _sent_blocks(scheduled)) for scheduled in self._replaced)
        readers: list[Checkpoint] = []
        masks: list[tuple[int, IntArray]] = []
        rows = self._make_rows(readers, masks)
        moves, made = self._manager.finish_plan()
        plan = StepPlan(
            self.step,
            removed,
            moves,
            added,
            replaced,
            rows,
            len(self._steady) + len(self._decodes),
            len(rows.tokens),
            rows.row[rows.samples],
            TokenMasks(np.asarray([i for i, _ in masks], np.int32), np.stack([m for _, m in masks])) if masks else None,
        )
        requests = [*self._steady, *(work.scheduled for work in itertools.chain(self._decodes, self._prefills))]
        everybody = len(plan.sampled_rows) == len(requests)
        sampled = requests if everybody else list(itertools.compress(requests, rows.samples.tolist()))
        return IssuedStep(plan, requests, sampled, readers, made)

    def _make_row(self, scheduled: ScheduledRequest) -> AddedRow:
        request = scheduled.request
        return AddedRow(
            row=scheduled.row,
            request_id=request.id,
            token_ids=request.all_token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
            block_ids=_sent_blocks(scheduled),
            wants_prompt_logprobs=request.wants_prompt_logprobs,
        )

    def _make_rows(self, readers: list[Checkpoint], masks: list[tuple[int, IntArray]]) -> StepRows:
        """All rows, those of one token in mid-block first; fills in the checkpoints that they read, and `masks` by
        index among the sampled positions. The leases advance past the rows' tokens; what these complete, drafts apart,
        is published. The loops over steady rows are this plain because there are hundreds of them."""
        num_steady, works = len(self._steady), self._decodes + self._prefills
        num_positions = num_steady
        count = num_steady + len(works)
        columns = np.zeros((8, count + 1), np.int32)
        row, start, num_tokens, num_drafts, read_slot, write_slot = columns[:6, :count]
        samples, optimistic = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        if num_steady:
            leases = [scheduled.lease for scheduled in self._steady]
            row[:num_steady] = [scheduled.row for scheduled in self._steady]
            start[:num_steady] = [lease.num_planned for lease in leases]
            read_slot[:num_steady] = write_slot[:num_steady] = [lease.slot for lease in leases]
            num_tokens[:num_steady] = 1
            self._manager.advance_steady(leases)
        tokens = [np.full(num_steady, LAST_SAMPLED, np.int32), *(work.tokens for work in works)]
        blocks: list[int] = []
        saves: list[tuple[int, int]] = []
        for i, work in enumerate(works, num_steady):
            scheduled, lease, num_own = work.scheduled, work.scheduled.lease, len(work.tokens)
            begin = lease.num_planned
            end = begin + num_own
            read = self._manager.read_slot(lease)
            columns[:6, i] = (scheduled.row, begin, num_own, work.num_drafts, read, lease.slot)
            blocks += lease.block_ids(lease.num_sent_blocks, lease.num_blocks)
            saves += [(save.num_tokens, save.slot) for save in lease.saves]
            columns[6:, i + 1] = (len(blocks), len(saves))
            samples[i], optimistic[i] = end >= scheduled.num_tokens_at_admission, begin > scheduled.request.num_tokens
            if samples[i]:
                assert work.masks or scheduled.request.grammar is None, "a request whose output is whole was planned"
                masks += enumerate(work.masks, num_positions)
                num_positions += 1 + work.num_drafts
            reading = self._manager.advance(lease, end, work.decodes)
            if reading is not None:
                readers.append(reading)
            if not work.decodes or (lease.saves and not lease.in_reach):
                self._manager.filing.publish(lease, begin if work.decodes else end)
        positions, slots = np.asarray(saves, np.int32).reshape(len(saves), 2).T
        return StepRows(
            row,
            start,
            num_tokens,
            num_drafts,
            read_slot,
            write_slot,
            samples,
            np.concatenate(tokens),
            columns[6],
            np.asarray(blocks, np.int32),
            columns[7],
            positions,
            slots,
            optimistic,
        )


def _sent_blocks(scheduled: ScheduledRequest) -> IntArray:
    return np.asarray(scheduled.lease.block_ids(0, scheduled.lease.num_sent_blocks), np.int32)

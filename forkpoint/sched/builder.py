"""A plan under construction. It refers to requests, not to ids: compaction may move blocks and slots until its end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Checkpoint
from forkpoint.sched.issued_step import IssuedStep
from forkpoint.sched.plan import (
    LAST_SAMPLED,
    AddedRow,
    IntArray,
    ReplacedPrefix,
    StateFlush,
    StepPlan,
    StepRows,
    TokenMasks,
)
from forkpoint.sched.scheduled_request import ScheduledRequest, num_written


@dataclass(frozen=True, slots=True)
class _Work:
    """The tokens that one row computes, from the end of its planned tokens on."""

    scheduled: ScheduledRequest
    tokens: IntArray
    decodes: bool  # through the decode kernels: the tokens after the first are drafts
    masks: Sequence[IntArray] = ()  # under a grammar: one for each position that is sampled

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - 1 if self.decodes else 0


class PlanBuilder:
    """Collects the work of one step, and at the end turns it into a StepPlan."""

    def __init__(self, step: int, budget: int, cache: CacheManager, state_write_interval: int) -> None:
        """`budget` is the number of tokens that the step may still compute; each row added lowers it."""
        self.step = step
        self.budget = budget
        self._cache = cache
        self._interval = state_write_interval
        self._added: list[ScheduledRequest] = []
        self._replaced: dict[ScheduledRequest, None] = {}
        self._steady: list[ScheduledRequest] = []
        self._decodes: list[_Work] = []
        self._prefills: list[_Work] = []

    @property
    def num_rows(self) -> int:
        """The number of rows whose tokens are already deducted from the budget."""
        return len(self._steady) + len(self._decodes) + len(self._prefills)

    def cap(self, num_tokens: int) -> None:
        """Let the step compute at most `num_tokens` more tokens."""
        self.budget = min(self.budget, num_tokens)

    def add_row(self, scheduled: ScheduledRequest) -> None:
        self._added.append(scheduled)

    def replace_prefix(self, scheduled: ScheduledRequest) -> None:
        """Let the plan resend the row's block table, up to the blocks that the worker already has."""
        self._replaced[scheduled] = None

    def drop_duplicates(self, scheduled: ScheduledRequest) -> None:
        """Give back the row's blocks that the tree has too, if there are any, and resend the row's block table."""
        if scheduled.lease.has_duplicates:
            self._cache.drop_duplicates(scheduled.lease)
            self.replace_prefix(scheduled)

    def add_steady(self, requests: list[ScheduledRequest]) -> None:
        """Add decode steps of one token that need nothing from the cache, and take them off the budget.

        Each row is in mid-block and has neither drafts nor a grammar. It reads and writes its running slot.
        """
        self._steady += requests
        self.budget -= len(requests)

    def add_decode(
        self, scheduled: ScheduledRequest, drafts: IntArray | None = None, masks: Sequence[IntArray] = ()
    ) -> None:
        """Add the row's next token through the decode kernels, with `drafts` after it, to the plan.

        An earlier run of the request may have sampled that token already. `masks`: what a grammar allows after each
        draft. The budget falls by one token and the drafts.
        """
        start, request = scheduled.lease.num_planned, scheduled.request
        if start < scheduled.num_tokens_at_admission:
            tokens = request.token_ids(start, start + 1)
        else:
            tokens = np.full(1, LAST_SAMPLED, np.int32)
        if drafts is not None:
            tokens = np.concatenate([tokens, drafts])
        self._add(scheduled, tokens, masks, decodes=True)

    def add_prefill(self, scheduled: ScheduledRequest, end: int) -> None:
        """Add the row's next tokens, up to position `end`, through the prefill kernels."""
        self._add(scheduled, scheduled.request.token_ids(scheduled.lease.num_planned, end), (), decodes=False)

    def _add(self, scheduled: ScheduledRequest, tokens: IntArray, masks: Sequence[IntArray], *, decodes: bool) -> None:
        grammar = scheduled.request.grammar
        if grammar is None or grammar.is_free or grammar.mask is None:
            masks = ()
        else:
            masks = (grammar.mask, *masks)
        scheduled.last_step = self.step
        works = self._decodes if decodes else self._prefills
        works.append(_Work(scheduled, tokens, decodes, masks))
        self.budget -= len(tokens)

    def finish(
        self,
        removed: tuple[int, ...],
        flushes: tuple[StateFlush, ...] = (),
        dropped_images: tuple[bytes, ...] = (),
        waits_for_tiers: bool = False,
    ) -> IssuedStep:
        """Return the plan with what to do once its result is there. Call it once, last.

        The leases' planned tokens advance past the plan, and the cache files what it computes. `removed` rows, their
        `flushes` and `dropped_images` (digests) go into the plan as they are.
        """
        added = tuple(self._make_row(scheduled) for scheduled in self._added)
        replaced = tuple(ReplacedPrefix(scheduled.row, *self._sent_blocks(scheduled)) for scheduled in self._replaced)
        masks: list[tuple[int, IntArray]] = []
        rows = self._make_rows(masks)
        readers: list[Checkpoint] = []
        computed: list[tuple[Lease, int]] = []
        if self._decodes or self._prefills:
            readers, computed = self._advance()
        moves, fetches, filed = self._cache.commit(computed, (scheduled.lease for scheduled in self._steady))
        token_masks: TokenMasks | None = None
        if masks:
            places = np.asarray([i for i, _ in masks], np.int32)
            token_masks = TokenMasks(places, np.stack([mask for _, mask in masks]))
        plan = StepPlan(
            step=self.step,
            removed=removed,
            flushes=flushes,
            dropped_images=dropped_images,
            moves=moves,
            added=added,
            replaced=replaced,
            rows=rows,
            num_decodes=len(self._steady) + len(self._decodes),
            num_tokens=len(rows.tokens),
            sampled_rows=rows.row[rows.samples],
            masks=token_masks,
            waits_for_tiers=waits_for_tiers,
            fetches=fetches,
        )
        requests = [*self._steady, *(work.scheduled for work in itertools.chain(self._decodes, self._prefills))]
        sampled = requests
        if len(plan.sampled_rows) < len(requests):
            sampled = list(itertools.compress(requests, rows.samples.tolist()))
        return IssuedStep(plan, requests, sampled, readers, filed)

    def _make_row(self, scheduled: ScheduledRequest) -> AddedRow:
        request = scheduled.request
        first, more = self._sent_blocks(scheduled)
        return AddedRow(
            row=scheduled.row,
            request_id=request.id,
            token_ids=request.all_token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
            block_ids=first,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            images=request.images,
            more_block_ids=more,
        )

    def _sent_blocks(self, scheduled: ScheduledRequest) -> tuple[IntArray, tuple[IntArray, ...]]:
        """Return the blocks that the worker has, or gets with the row: of the first group, and of the others."""
        groups = self._cache.block_ids(scheduled.lease, 0, scheduled.lease.num_sent_blocks)
        first, *more = (np.asarray(ids, np.int32) for ids in groups or [[]])
        return first, tuple(more)

    def _make_rows(self, masks: list[tuple[int, IntArray]]) -> StepRows:
        """Return the rows, the steady ones first. Adds the masks to `masks`, each with the index of its position."""
        num_steady, works = len(self._steady), self._decodes + self._prefills
        num_positions = num_steady
        count = num_steady + len(works)
        columns = np.zeros((10, count + 1), np.int32)
        row, start, num_tokens, num_drafts, read_slot, write_slot, first_decode, pending = columns[:8, :count]
        samples, optimistic = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        if num_steady:
            self._fill_steady(columns[:, :num_steady])
        tokens = [np.full(num_steady, LAST_SAMPLED, np.int32), *(work.tokens for work in works)]
        blocks: list[list[int]] = [[] for _ in self._cache.layout.groups or [None]]
        num_blocks = 0
        saves: list[tuple[int, int]] = []
        for i, work in enumerate(works, num_steady):
            scheduled, lease, num_own = work.scheduled, work.scheduled.lease, len(work.tokens)
            begin = lease.num_planned
            end = begin + num_own
            own = (scheduled.row, begin, num_own, work.num_drafts, lease.read_slot, lease.slot)
            columns[:8, i] = (*own, lease.first_decode, lease.num_pending)
            if lease.num_blocks > lease.num_sent_blocks:
                num_blocks += lease.num_blocks - lease.num_sent_blocks
                new = self._cache.block_ids(lease, lease.num_sent_blocks, lease.num_blocks)
                for ids, more in zip(blocks, new, strict=True):
                    ids += more
            saves += [(save.num_tokens, save.slot) for save in lease.saves]
            columns[8:, i + 1] = (num_blocks, len(saves))
            samples[i] = end >= scheduled.num_tokens_at_admission
            optimistic[i] = begin > scheduled.request.num_tokens
            if samples[i]:
                assert work.masks or not scheduled.request.is_constrained, "a request whose output is whole was planned"
                masks += enumerate(work.masks, num_positions)
                num_positions += 1 + work.num_drafts
        written = start
        if self._interval > 1 and num_steady + len(self._decodes):  # states of rows in prefill do not lag
            written = num_written(first_decode, start, pending, self._interval)
        positions, slots = np.asarray(saves, np.int32).reshape(len(saves), 2).T
        new_blocks, *more_blocks = (np.asarray(ids, np.int32) for ids in blocks)
        return StepRows(
            row=row,
            start=start,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            read_slot=read_slot,
            write_slot=write_slot,
            written=written,
            pending=pending,
            samples=samples,
            tokens=np.concatenate(tokens),
            block_ptr=columns[8],
            new_blocks=new_blocks,
            save_ptr=columns[9],
            save_positions=positions,
            save_slots=slots,
            optimistic=optimistic,
            more_blocks=tuple(more_blocks),
        )

    def _advance(self) -> tuple[list[Checkpoint], list[tuple[Lease, int]]]:
        """Advance the leases of the other rows past the plan.

        Returns the checkpoints that the rows read, and the leases with the number of tokens that can be filed. Drafts
        do not count, and a row that decodes is listed only where a state may be complete.
        """
        readers: list[Checkpoint] = []
        computed: list[tuple[Lease, int]] = []
        for work in self._decodes + self._prefills:
            lease, begin = work.scheduled.lease, work.scheduled.lease.num_planned
            reading = lease.advance(begin + len(work.tokens), work.decodes)
            if reading is not None:
                readers.append(reading)
            if not work.decodes:
                computed.append((lease, lease.num_planned))
            elif lease.saves and not lease.in_reach:
                computed.append((lease, begin))
        return readers, computed

    def _fill_steady(self, columns: IntArray) -> None:
        """Fill in the columns of the steady rows. The loops are this plain because there are hundreds of such rows."""
        leases = [scheduled.lease for scheduled in self._steady]
        columns[0] = [scheduled.row for scheduled in self._steady]
        columns[1] = [lease.num_planned for lease in leases]
        columns[2] = 1
        columns[4:6] = [lease.slot for lease in leases]  # read and written
        if self._interval > 1:
            columns[6] = [lease.first_decode for lease in leases]

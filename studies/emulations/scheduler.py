"""Continuous batching like that of other engines, over an emulated cache."""

from __future__ import annotations

import bisect
import itertools

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.outputs import CacheReport
from forkpoint.sim.cost import StepLoad
from forkpoint.sim.replica import ReplicaCounters, StepNews
from forkpoint.sim.trace import TraceRequest
from studies.emulations.sequence import EmulatedCache, EmulatedHit, Sequence, StepPlanned


class EmulatedScheduler:
    """Schedules first come, first served: running requests before waiting ones, with one token budget for all.

    Rows that decode cost no time per step here, because a row is examined only at positions that the cache names.
    """

    def __init__(
        self, name: str, cache: EmulatedCache, layout: CacheLayout, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self.name = name
        self.cache = cache
        self._layout = layout
        self._budget = max_num_batched_tokens
        self._max_num_seqs = min(max_num_seqs, cache.max_num_seqs)
        self._arrivals = itertools.count()
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []  # in order of arrival
        self._decoding: dict[Sequence, None] = {}
        self._decode_kv_tokens = 0  # keys that the rows that decode attend to in the current step
        self._step = 0
        self._due: dict[int, list[tuple[Sequence, int]]] = {}  # step -> (sequence, its epoch)
        self._first: list[Sequence] = []
        self._counters = ReplicaCounters()

    def add(self, request: TraceRequest) -> bool:
        """Queue a request. Return False if even an empty cache could not hold it."""
        sequence = Sequence.of(request, next(self._arrivals))
        if not self.cache.can_ever_fit(sequence):
            return False
        self._waiting.append(sequence)
        return True

    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def restorable(self, request: TraceRequest) -> int:
        """Return the number of tokens that a hit would cover now."""
        return self.cache.lookup(Sequence.of(request, 0), request.prompt.num_tokens).num_tokens

    # --- a step

    def plan(self, now_s: float) -> StepLoad | None:
        """Plan the next step. Return None if there is nothing to do."""
        if not (self._waiting or self._running):
            return None
        planned = StepPlanned(self._budget)
        preempted = self._plan_decodes(planned)
        for sequence in list(self._prefilling):
            if sequence in self._prefilling and not self._continue_prefill(planned, sequence):
                break
        if not preempted:
            self._admit(planned)
        num_decodes = len(self._decoding)
        if not num_decodes and not planned.num_segments:
            raise AssertionError(f"{self.name}: nothing can run, yet {self.num_unfinished()} requests wait")
        self._first = planned.first_tokens
        self._count(planned, num_decodes)
        return StepLoad(
            prefill_tokens=planned.prefill_tokens,
            prefill_pairs=planned.prefill_pairs,
            num_segments=planned.num_segments,
            num_decodes=num_decodes,
            decode_kv_tokens=self._decode_kv_tokens,
            num_saves=planned.num_saves,
            num_sampled=num_decodes + len(planned.first_tokens),
            copied_bytes=planned.copied_bytes,
        )

    def _count(self, planned: StepPlanned, num_decodes: int) -> None:
        layout, counters = self._layout, self._counters
        tokens = planned.prefill_tokens + num_decodes
        counters.kv_written_bytes += tokens * layout.block_bytes // BLOCK_SIZE
        counters.state_written_bytes += planned.num_saves * layout.slot_bytes

    def finish(self, now_s: float) -> StepNews:
        """Finish the planned step."""
        first, finished = self._first, []
        self._first = []
        self._decode_kv_tokens += len(self._decoding)
        self._step += 1
        for sequence in first:
            self._start_decoding(sequence)
        for sequence, epoch in self._due.get(self._step, ()):
            if sequence.epoch == epoch and self._position(sequence) >= sequence.last_computed:
                finished.append(sequence)
        for sequence in finished:
            self._leave(sequence, self._position(sequence), finished=True)
        reports = {s.request.id: CacheReport(0, s.num_cached_tokens, s.kv_num_tokens) for s in finished}
        return StepNews(tuple(s.request.id for s in first), reports)

    def counters(self) -> ReplicaCounters:
        """Return the counters so far."""
        counts = self.cache.counts
        self._counters.states_evicted = counts.states_evicted
        self._counters.blocks_evicted = counts.blocks_evicted
        return self._counters

    # --- decodes

    def _position(self, sequence: Sequence) -> int:
        """Return the position that the current step decodes."""
        assert sequence.decode_base is not None
        return sequence.decode_base + self._step

    def _start_decoding(self, sequence: Sequence) -> None:
        sequence.decode_base = sequence.prefill_end - self._step
        self._decoding[sequence] = None
        self._decode_kv_tokens += sequence.prefill_end + 1
        self._wait_for_event(sequence, sequence.prefill_end)

    def _wait_for_event(self, sequence: Sequence, position: int) -> None:
        """Examine the sequence again at the first position from `position` on that the cache names, or at its end."""
        when = min(self.cache.next_event(position), sequence.last_computed) - position
        self._due.setdefault(self._step + when, []).append((sequence, sequence.epoch))

    def _plan_decodes(self, planned: StepPlanned) -> bool:
        """Give decoding rows the room that they need. Return True if a request was preempted."""
        preempted = False
        for sequence, epoch in sorted(self._due.pop(self._step, ()), key=lambda due: due[0].order):
            while sequence.epoch == epoch:
                position = self._position(sequence)
                done = self.cache.decode_event(sequence, position)
                if done is not None:
                    planned.num_saves += done.num_saves
                    planned.copied_bytes += done.copied_bytes
                    when = min(self.cache.next_event(position + 1), sequence.last_computed) - position
                    self._due.setdefault(self._step + when, []).append((sequence, epoch))
                    break
                self._preempt(self._running[-1])
                preempted = True
        while not self.cache.end_step(len(self._decoding)):
            self._preempt(self._running[-1])
            preempted = True
        planned.budget -= len(self._decoding)
        return preempted

    # --- prefill

    def _continue_prefill(self, planned: StepPlanned, sequence: Sequence) -> bool:
        start = sequence.num_computed
        end = self._end_of_chunk(sequence, start, planned.budget)
        if end <= start:
            return True
        while not self.cache.grow(sequence, end):
            victim = self._running[-1]
            if victim is sequence:
                if len(self._running) > 1:
                    return False
                raise AssertionError(f"{self.name}: {sequence.request.id} does not fit an otherwise empty cache")
            self._preempt(victim)
        self._run_chunk(planned, sequence, start, end)
        return True

    def _end_of_chunk(self, sequence: Sequence, start: int, budget: int) -> int:
        end = min(sequence.prefill_end, start + budget)
        return self.cache.chunk_end(sequence, start, end, budget) if end > start else start

    def _run_chunk(self, planned: StepPlanned, sequence: Sequence, start: int, end: int) -> None:
        planned.add_chunk(start, end, self.cache.chunk_done(sequence, start, end))
        sequence.num_computed = end
        if end == sequence.prefill_end:
            planned.first_tokens.append(sequence)
            self._prefilling.remove(sequence)

    def _admit(self, planned: StepPlanned) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs and planned.budget > 0:
            sequence = self._waiting[0]
            hit = self.cache.lookup(sequence, sequence.prefill_end)
            sequence.junction = hit.kv_num_tokens if hit.kv_num_tokens > hit.num_tokens else 0
            started = self._start(planned, sequence, hit)
            if not started and hit.num_tokens and not self._running:
                # A hit holds what it starts from; a request that has no room for that beside itself computes all.
                started = self._start(planned, sequence, EmulatedHit(0, hit.kv_num_tokens))
            if not started:
                return
            self._waiting.pop(0)

    def _start(self, planned: StepPlanned, sequence: Sequence, hit: EmulatedHit) -> bool:
        """Run a sequence's first chunk from a hit, if there is budget and room for it."""
        end = self._end_of_chunk(sequence, hit.num_tokens, planned.budget)
        if end <= hit.num_tokens or not self.cache.start(sequence, hit, end):
            return False
        self._record_hit(sequence, hit)
        bisect.insort(self._running, sequence, key=lambda s: s.order)
        self._prefilling.append(sequence)
        self._run_chunk(planned, sequence, hit.num_tokens, end)
        return True

    def _record_hit(self, sequence: Sequence, hit: EmulatedHit) -> None:
        if hit.kv_num_tokens > hit.num_tokens:
            lost = self._counters.lost_tokens
            lost["no_checkpoint"] = lost.get("no_checkpoint", 0) + hit.kv_num_tokens - hit.num_tokens
        if not sequence.num_preemptions:
            sequence.num_cached_tokens, sequence.kv_num_tokens = hit.num_tokens, hit.kv_num_tokens

    # --- leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.num_preemptions += 1
        sequence.num_preemptions += 1
        decoding = sequence in self._decoding
        computed = self._position(sequence) if decoding else sequence.num_computed
        self._leave(sequence, computed, finished=False)
        sequence.prefill_end = computed + 1 if decoding else sequence.prefill_end  # the last sampled token comes again
        sequence.num_computed = 0
        bisect.insort(self._waiting, sequence, key=lambda s: s.order)

    def _leave(self, sequence: Sequence, num_computed: int, finished: bool) -> None:
        if sequence in self._decoding:
            self._decode_kv_tokens -= self._position(sequence) + 1
            del self._decoding[sequence]
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        sequence.decode_base = None
        sequence.epoch += 1
        self._running.remove(sequence)
        self.cache.free(sequence, num_computed, finished)

"""Any sequence of arrivals, aborts, failures and steps leaves outputs as in an uncached run, and nothing leaks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forkpoint.config import CacheConfig
from forkpoint.errors import RequestTooLargeError
from forkpoint.images import ImageSpan
from forkpoint.params import FinishReason
from tests.cache.published import Listener
from tests.sched.harness import VOCAB, WITH_WINDOWS, Harness, image_span, tokens

LENGTHS = st.one_of(
    st.integers(1, 700),
    st.builds(lambda n, d: 64 * n + d, st.integers(1, 10), st.sampled_from([-1, 0, 1, 63])),
)
TRUNK = tokens(99, 2000)
# Tokens of text before it, rows, columns, and which of few images it is.
IMAGE = st.tuples(
    st.sampled_from([0, 1, 2, 40, 64, 200]), st.integers(1, 20), st.sampled_from([1, 3, 16]), st.integers(0, 3)
)


class Serving(RuleBasedStateMachine):
    """Requests whose prompts branch off a common trunk or off each other's histories."""

    @initialize(
        layout=st.sampled_from(sorted(WITH_WINDOWS)),
        tokens_of_room=st.integers(300, 6000),
        spare_slots=st.integers(1, 12),
        budget=st.sampled_from([128, 192, 500, 2048]),
        max_num_seqs=st.integers(1, 6),
        async_scheduling=st.booleans(),
        deterministic=st.booleans(),
        policy=st.sampled_from(["cost", "lru"]),
        interval=st.sampled_from([0, 64, 128, 512]),
        mode=st.sampled_from(["align", "align", "align", "none"]),
        caching=st.sampled_from([True, True, True, False]),
        ghosts=st.sampled_from([0, 3, 1000]),
        most_drafts=st.sampled_from([0, 1, 4, 4, 63]),
        draft_chance=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
        state_write_interval=st.sampled_from([1, 8, 8, 32]),
        encoder_budget=st.sampled_from([None, 1, 100, 300]),
        encoder_cache_size=st.sampled_from([0, 200, 1 << 15]),
        host_tokens=st.sampled_from([None, 200, 2000, 20000]),
        host_streams=st.booleans(),
        loaded_at_once=st.sampled_from([0, 1, 20_000]),
        disk_tokens=st.sampled_from([None, 200, 2000, 20000]),
        disk_delay=st.sampled_from([0, 2, 9]),
        disk_fail_chance=st.sampled_from([0.0, 0.0, 0.02]),
    )
    def start(  # type: ignore[no-untyped-def]
        self,
        layout,
        tokens_of_room,
        spare_slots,
        budget,
        max_num_seqs,
        async_scheduling,
        deterministic,
        policy,
        interval,
        mode,
        caching,
        ghosts,
        most_drafts,
        draft_chance,
        state_write_interval,
        encoder_budget,
        encoder_cache_size,
        host_tokens,
        host_streams,
        loaded_at_once,
        disk_tokens,
        disk_delay,
        disk_fail_chance,
    ) -> None:
        chosen = WITH_WINDOWS[layout]
        stored = chosen.in_tiers()
        self.harness = Harness(
            layout=chosen,
            num_pages=chosen.num_pages_for(tokens_of_room, spare_slots) + 2,
            budget=max(budget, max_num_seqs + 63),
            max_num_seqs=max_num_seqs,
            async_scheduling=async_scheduling,
            deterministic=deterministic,
            most_drafts=most_drafts,
            draft_chance=draft_chance,
            state_write_interval=state_write_interval,
            encoder_budget=encoder_budget,
            encoder_cache_size=encoder_cache_size,
            num_host_pages=0 if host_tokens is None else stored.num_pages_for(host_tokens, spare_slots) + 1,
            host_streams=host_streams and host_tokens is not None,
            loaded_at_once=loaded_at_once,
            num_disk_pages=stored.num_pages_for(disk_tokens, spare_slots) + 1 if disk_tokens else 0,
            disk_delay=disk_delay,
            disk_fail_chance=disk_fail_chance,
            cache=CacheConfig(
                eviction_policy=policy,
                checkpoint_interval=interval,
                mamba_cache_mode=mode,
                enable_prefix_caching=caching,
                num_ghosts=ghosts,
            ),
        )
        self.listener = Listener(self.harness.sched.cache)
        self.count = 0
        self.spoiled: set[str] = set()  # aborted, failed or made to fail
        self.num_broken = 0  # steps made to fail whatever they carry

    def new_request(self, prompt: np.ndarray, outputs: int, **options: Any) -> None:
        name = f"r{self.count}"
        self.count += 1
        try:
            self.harness.add(name, prompt.astype(np.int32), outputs, **options)
        except RequestTooLargeError:
            assert not self.harness.sched.cache.room.ever_fits(len(prompt) + outputs)

    @rule(
        shared=st.integers(0, 900),
        own=LENGTHS,
        seed=st.integers(0, 3),
        outputs=st.integers(1, 150),
        copies=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "b"]),
        breakpoints=st.lists(st.integers(0, 1000), max_size=2),
        logprobs=st.sampled_from([None, None, None, 0]),
        grammar_length=st.sampled_from([0, 0, 0, 1, 40, 200]),
        calls_tools=st.booleans(),
        images=st.lists(IMAGE, max_size=4),
    )
    def arrive(  # type: ignore[no-untyped-def]
        self,
        shared,
        own,
        seed,
        outputs,
        copies,
        priority,
        salt,
        breakpoints,
        logprobs,
        grammar_length,
        calls_tools,
        images,
    ) -> None:
        prompt = np.concatenate([TRUNK[:shared], tokens(seed, own)])
        spans, end = list[ImageSpan](), 0
        for gap, num_rows, num_columns, number in images:
            spans.append(image_span(end + gap, num_rows, num_columns, number))
            end = spans[-1].end
        for _ in range(copies):
            self.new_request(
                prompt,
                outputs,
                priority=priority,
                cache_salt=salt,
                breakpoints=tuple(breakpoints),
                prompt_logprobs=logprobs,
                grammar_length=grammar_length,
                tool_call_token_ids=frozenset(range(0, VOCAB, 50)) if calls_tools else frozenset(),
                images=tuple(span for span in spans if span.end <= len(prompt)),
            )

    @rule(pick=st.integers(0, 10**6), more=LENGTHS, outputs=st.integers(1, 150))
    def next_turn(self, pick: int, more: int, outputs: int) -> None:
        """A prompt that extends what an earlier request has so far."""
        if not self.harness.requests:
            return
        names = sorted(self.harness.requests)
        request = self.harness.requests[names[pick % len(names)]]
        history = request.all_token_ids()
        self.new_request(np.concatenate([history, tokens(pick % 5, more)]), outputs, images=request.images)

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        live = sorted(self.harness.sched._requests)
        if live:
            name = live[pick % len(live)]
            self.spoiled.add(name)
            assert self.harness.sched.abort(name)
            assert not self.harness.sched.abort(name)

    @rule(pick=st.integers(0, 10**6))
    def preempt(self, pick: int) -> None:
        running = self.harness.sched._running.requests
        if running and not self.harness.in_flight:
            self.harness.sched._departures.preempt(running[pick % len(running)])

    @rule(pick=st.integers(0, 10**6))
    def poison(self, pick: int) -> None:
        """The model will produce NaN for a request."""
        live = sorted(self.harness.sched._requests)
        if live:
            name = live[pick % len(live)]
            self.spoiled.add(name)
            self.harness.runner.non_finite_requests.add(name)

    @rule(pick=st.integers(0, 10**6), beyond=st.integers(0, 300))
    def poison_steps(self, pick: int, beyond: int) -> None:
        """Every step that computes more of a request's tokens than so many raises."""
        live = sorted(self.harness.sched._requests)
        if live:
            name = live[pick % len(live)]
            self.spoiled.add(name)
            self.harness.runner.poison[name] = beyond

    @rule()
    @precondition(lambda self: self.count > 2)
    def break_step(self) -> None:
        """The next step's forward pass raises, whatever it carries."""
        self.harness.fail_next = True
        self.num_broken += 1

    @rule()
    def reset(self) -> None:
        self.harness.sched.reset_prefix_cache()

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.harness.step():
                break

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "harness"):
            sched = self.harness.sched
            sched.check_integrity()
            histories = [request.all_token_ids() for request in list(self.harness.requests.values())[-2:]]
            cuts = [history[: len(history) * 2 // 3] for history in histories]
            self.listener.check([TRUNK[:700], *histories, *cuts])

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.run()
        failed = {name for name in harness.requests if self.check_request(name)}
        assert len(failed - self.spoiled) <= self.num_broken, "a request ended for another's fault"
        harness.check_hits()
        stats = harness.sched.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.cache.num_slots_used == stats.cache.num_checkpoints, "a slot leaked"
        if harness.layout.has_kv:
            assert stats.cache.num_blocks_used == stats.cache.num_cached_blocks, "a block leaked"
        assert len(harness.sched._running.removed_rows) == len(harness.runner.rows)
        harness.sched.reset_prefix_cache()
        left = harness.sched.stats().cache
        assert left.num_free_host_pages == max(0, left.num_host_pages - 1), "pages of the host tier are lost"
        assert left.num_free_disk_pages == max(0, left.num_disk_pages - 1), "pages of the disk tier are lost"
        assert left.num_free_pages == left.num_pages - 1, "pages are lost after a reset"

    def check_request(self, name: str) -> bool:
        """Returns whether it failed."""
        harness, request = self.harness, self.harness.requests[name]
        failed = any(u.finish_reason is FinishReason.ERROR for u in harness.updates[name])
        output = harness.output(name)
        expected = harness.expected(name)
        if failed or name in self.spoiled:
            assert output == expected[: len(output)], f"{name}: wrong before it ended early"
            return failed
        assert output == expected, f"{name}: cached and uncached outputs differ"
        if not request.num_preemptions and not harness.async_scheduling:
            computed = harness.computed[name] - (len(expected) - 1)
            assert computed == request.num_prompt_tokens - request.cache.num_cached_tokens
        return failed


# FORKPOINT_SHRINK=0 reports the first failure at once
shrink = os.environ.get("FORKPOINT_SHRINK", "1") == "1"
phases = tuple(phase for phase in Phase if shrink or phase is not Phase.shrink)
profile = {"max_examples": int(os.environ.get("FORKPOINT_EXAMPLES", "45")), "stateful_step_count": 30}
Serving.TestCase.settings = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=phases, **profile)
TestServing = Serving.TestCase
assert VOCAB > 1

"""Requests whose next ids depend on the ones before: they are not planned early, and nobody else waits."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.errors import StructuredOutputError
from forkpoint.params import FinishReason
from forkpoint.sched.plan import IntArray, StepPlan
from tests.hash_grammar import HashGrammar
from tests.sched.harness import LAYOUTS, VOCAB, Harness, tokens


class Watched(Harness):
    """Keeps the plans."""

    def _note(self, plan: StepPlan) -> None:
        super()._note(plan)
        self.plans = [*getattr(self, "plans", []), plan]

    def steps_of(self, name: str) -> list[int]:
        """Indices of the plans that sample for a request; its row must not change."""
        (row,) = {added.row for plan in self.plans for added in plan.added if added.request_id == name}
        return [i for i, plan in enumerate(self.plans) if row in plan.sampled_rows]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_outputs_end_with_their_grammar(layout: str, async_scheduling: bool) -> None:
    harness = Harness(layout=LAYOUTS[layout], async_scheduling=async_scheduling)
    harness.add("free", tokens(1, 200), 90)
    harness.add("whole", tokens(1, 230), 300, grammar_length=100)
    harness.add("cut", tokens(2, 70), 30, grammar_length=100)
    harness.add("both", tokens(3, 70), 30, grammar_length=30)
    harness.run()
    for name, count in (("free", 90), ("whole", 100), ("cut", 30), ("both", 30)):
        harness.check_output(name)
        assert len(harness.output(name)) == count
    reasons = {name: harness.updates[name][-1].finish_reason for name in harness.updates}
    long, stop = FinishReason.LENGTH, FinishReason.STOP
    assert reasons == {"free": long, "whole": stop, "cut": long, "both": stop}
    assert all(updates[-1].stop_token_id is None for updates in harness.updates.values())


def test_only_rows_with_a_grammar_skip_the_async_scheduling() -> None:
    harness = Watched(async_scheduling=True)
    harness.add("free", tokens(1, 64), 60)
    harness.add("bound", tokens(2, 64), 60, grammar_length=20)
    harness.run()
    free, bound = harness.steps_of("free"), harness.steps_of("bound")
    assert free == list(range(free[0], free[0] + 60)), "a free row is in every step"
    assert np.diff(bound).tolist() == [2] * 19
    for plan in harness.plans:
        masked = plan.sampled_rows[plan.masks.rows].tolist() if plan.masks is not None else []
        assert masked == [row for row in plan.sampled_rows.tolist() if harness.plans.index(plan) in bound and row == 1]


def test_without_async_scheduling_no_step_is_skipped() -> None:
    harness = Watched()
    harness.add("bound", tokens(2, 64), 60, grammar_length=20)
    harness.run()
    assert harness.steps_of("bound") == list(range(20))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_requests_resume_under_their_grammar(async_scheduling: bool, deterministic: bool) -> None:
    harness = Harness(async_scheduling=async_scheduling, deterministic=deterministic)
    for i in range(3):
        harness.add(f"r{i}", tokens(i, 150), 200, grammar_length=150)
    for round_ in range(12):
        for _ in range(11):
            harness.step()
        running = harness.sched._running.requests
        harness.sched._departures.preempt(running[round_ % len(running)])
    harness.run()
    for i in range(3):
        harness.check_output(f"r{i}")
        assert len(harness.output(f"r{i}")) == 150
    assert sum(request.num_preemptions for request in harness.requests.values()) == 12


def test_failed_steps_leave_a_grammar_where_its_outputs_are() -> None:
    harness = Harness(async_scheduling=True)
    harness.add("victim", tokens(1, 64), 60)
    for _ in range(10):
        harness.step()
    harness.add("bound", tokens(2, 64), 60, grammar_length=40)
    for _ in range(6):
        harness.step()
    # Of two steps in flight the earlier one fails, and the request with a grammar is only in the later one.
    in_last = harness.sched._requests["bound"].last_step == harness.sched._num_steps - 1
    harness.runner.fail_steps.add(harness.sched._num_steps + (0 if in_last else 1))
    harness.run()
    assert harness.updates["victim"][-1].finish_reason is FinishReason.ERROR
    assert harness.requests["bound"].num_preemptions == 1
    harness.check_output("bound")


class DeadEnd(HashGrammar):
    """Nothing can follow the fifth output."""

    num_accepted = 0

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        self.num_accepted += 1
        if self.num_accepted == 5:
            raise StructuredOutputError("no token of the vocabulary goes on")


def test_a_dead_end_ends_one_request_and_keeps_its_cache() -> None:
    harness = Harness(async_scheduling=True)
    prompt: IntArray = tokens(4, 130)
    request = harness.add("dead", prompt, 60)
    request.grammar = DeadEnd(VOCAB, 60)
    harness.add("free", tokens(5, 100), 30)
    harness.run()
    last = harness.updates["dead"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, StructuredOutputError) and "goes on" in str(last.error)
    assert len(harness.output("dead")) == 5
    harness.check_output("free")
    assert harness.ask("again", prompt).cache.num_cached_tokens == 128

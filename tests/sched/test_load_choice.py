"""Loads from the host tier are given up, or begin small, by what is known of the tier's rate."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from forkpoint.cache.arena import MoveRoute
from forkpoint.cache.streamed_tier import StreamedHostTier
from forkpoint.cache.tier_entries import TierReport
from forkpoint.sched.plan import StepPlan
from tests.hash_disk import HashDisk
from tests.hash_runner import HashRunner
from tests.hash_step import AnsweredStep
from tests.sched.harness import LAYOUTS, tokens
from tests.sched.test_host_tier import ONE_UNIT, empty_arena, evicted, next_turn, tight


@pytest.mark.parametrize("layout", sorted({*LAYOUTS} - {"no keys and values"}))  # there it is one unit
def test_a_load_that_is_slower_than_computing_is_given_up(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.cache.tier_reads.PROBE_BYTES", ONE_UNIT)
    monkeypatch.setattr("forkpoint.cache.load_choice.LEAST_BYTES", ONE_UNIT)
    harness = tight(layout, host_streams=True)
    prompt, tier, now = evicted(harness), harness.sched.cache.tiers.host, [100.0]
    assert isinstance(tier, StreamedHostTier)
    tier._clock = tier._reader._clock = tier._choice._clock = lambda: now[0]
    tier._choice.note_step(1280, 0.0, 2.0)  # how long the prompt takes to compute
    for wait_s, gives_up in ((5.0, True), (0.0, True), (60.0, False)):
        name = f"after {wait_s} s"
        now[0] += wait_s
        begun = harness.add(name, next_turn(prompt, int(wait_s)), 2)
        while harness.step():
            now[0] += 5.0 if gives_up else 0.0
        harness.check_output(name)
        assert begun.cache is not None and begun.cache.num_restored_tokens == (0 if gives_up else 640)
        empty_arena(harness)


@pytest.mark.parametrize("has_rate", [False, True])
def test_only_loads_from_a_tier_of_unknown_rate_begin_small(has_rate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.cache.tier_reads.PROBE_BYTES", ONE_UNIT)
    monkeypatch.setattr("forkpoint.cache.load_choice.LEAST_BYTES", ONE_UNIT)
    harness = tight(host_streams=True)
    prompt, tier = evicted(harness), harness.sched.cache.tiers.host
    assert isinstance(tier, StreamedHostTier)
    tier._choice.note_load(2**40 if has_rate else 0, 1.0)
    monkeypatch.setattr(type(harness.runner.disk), "next_report", lambda self, waits: None)
    harness.add("waits", next_turn(prompt), 2)
    harness.step()
    assert (len(tier._reader._reads) > 1) == has_rate


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_plan_beside_other_requests_loads_little(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device fetches much and lands all that has arrived, unless others wait for the host to issue the copies."""
    for module in ("restoring", "tier_reads"):
        monkeypatch.setattr(f"forkpoint.cache.{module}.LOADED_AT_ONCE", ONE_UNIT)
    harness, moved = tight(host_streams=True), defaultdict[MoveRoute, list[int]](list)
    prompt, submit = evicted(harness), HashRunner.submit

    def count(runner: HashRunner, plan: StepPlan) -> AnsweredStep:
        for route in (MoveRoute.LOAD_TO_BUFFER, MoveRoute.LAND):
            moved[route].append(sum(move.route is route for move in plan.moves))
        return submit(runner, plan)

    monkeypatch.setattr(HashRunner, "submit", count)
    if is_busy:
        harness.add("stream", tokens(5, 64), 60)
        harness.step()
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens > 512
    assert all((max(counts) == 1) is is_busy for counts in moved.values()), moved


def test_a_plan_beside_other_requests_starts_few_reads_even_if_few_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that has landed what has arrived could take more, but must not start as many reads once more."""
    harness, num_loaded = tight(host_streams=True), list[int]()
    for module in ("restoring", "tier_reads"):
        monkeypatch.setattr(f"forkpoint.cache.{module}.LOADED_AT_ONCE", 2 * harness.layout.in_tiers().block_bytes)
    prompt, submit, disk = evicted(harness), HashRunner.submit, type(harness.runner.disk)
    next_report, done = disk.next_report, deque[int]()

    def one_at_a_time(runner: HashDisk, waits: bool) -> TierReport | None:
        found = next_report(runner, waits)
        done.extend(() if found is None else found.done)
        return TierReport((done.popleft(),)) if done else None

    def count(runner: HashRunner, plan: StepPlan) -> AnsweredStep:
        num_loaded.append(sum(move.route is MoveRoute.LOAD_TO_BUFFER for move in plan.moves))
        return submit(runner, plan)

    harness.add("stream", tokens(5, 64), 60)
    harness.step()
    harness.runner.disk.most_delay = 0
    monkeypatch.setattr(disk, "next_report", one_at_a_time)
    monkeypatch.setattr(HashRunner, "submit", count)
    assert harness.ask("again", next_turn(prompt), 2).cache.num_restored_tokens > 512
    assert max(num_loaded) == 2, num_loaded

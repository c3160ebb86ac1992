from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.engine.core import EngineCore
from forkpoint.errors import EngineStoppedError, StepFailedError
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.plan import StepPlan, SubmittedStep
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.sched.scheduler import Scheduler
from tests.cache.shapes import layout_of, state
from tests.hash_runner import HashRunner

VOCAB = 500
LAYOUT = layout_of([KVSpec.of(2, 16, 16, "float32"), state((3, 64), (4, 16, 16), "float32")])
MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@dataclass
class RecordingRunner(HashRunner):
    """Notes the order in which steps are submitted and their results asked for."""

    events: list[tuple[str, int]] = field(default_factory=list)
    refuse: bool = False

    def submit(self, plan: StepPlan) -> SubmittedStep:
        if self.refuse:
            raise ValueError("row 3 is not in the batch")
        self.events.append(("submit", plan.step))
        pending, events = super().submit(plan), self.events

        class Noted:
            def result(self) -> object:
                events.append(("result", plan.step))
                return pending.result()

        return Noted()  # type: ignore[return-value]


def make(async_scheduling: bool) -> tuple[EngineCore, RecordingRunner]:
    config = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8)
    scheduler = Scheduler(LAYOUT, 400, CacheConfig(), config)
    runner = RecordingRunner(LAYOUT, 400, VOCAB)
    return EngineCore(scheduler, runner, async_scheduling=async_scheduling), runner


def request(name: str, seed: int, size: int = 100, max_tokens: int = 6) -> Request:
    prompt = np.random.default_rng(seed).integers(0, VOCAB, size, dtype=np.int32)
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), max_tokens, seed=0)


def run(core: EngineCore) -> dict[str, list[RequestUpdate]]:
    news: dict[str, list[RequestUpdate]] = {}
    while core.has_unfinished():
        for update in core.step():
            news.setdefault(update.request.id, []).append(update)
    return news


def token_ids(updates: list[RequestUpdate]) -> list[int]:
    return [update.token_id for update in updates if update.token_id is not None]


def test_async_scheduling_changes_no_token() -> None:
    answers = []
    for async_scheduling in (False, True):
        core, _ = make(async_scheduling)
        for seed in range(5):
            core.add(request(f"r{seed}", seed, size=80 + 90 * seed, max_tokens=4 + seed))
        answers.append({name: token_ids(updates) for name, updates in run(core).items()})
    assert answers[0] == answers[1]
    assert {name: len(tokens) for name, tokens in answers[0].items()} == {f"r{seed}": 4 + seed for seed in range(5)}


def test_sync_waits_for_each_step_and_async_submits_one_more() -> None:
    orders = {}
    for async_scheduling in (False, True):
        core, runner = make(async_scheduling)
        core.add(request("r", 1))
        run(core)
        orders[async_scheduling] = runner.events
    assert orders[False][:4] == [("submit", 0), ("result", 0), ("submit", 1), ("result", 1)]
    assert orders[True][:4] == [("submit", 0), ("submit", 1), ("result", 0), ("submit", 2)]


@MODES
def test_a_failed_step_ends_its_requests_and_no_others(async_scheduling: bool) -> None:
    core, runner = make(async_scheduling)
    runner.fail_steps = {1}
    core.add(request("bad", 1, size=500))
    news: dict[str, list[RequestUpdate]] = {}
    while "bad" not in news:
        for update in core.step():
            news.setdefault(update.request.id, []).append(update)
    (update,) = news["bad"]
    assert update.finish_reason is FinishReason.ERROR
    assert isinstance(update.error, StepFailedError) and "step 1 failed: InjectedFailure" in str(update.error)
    core.add(request("good", 1, size=500))
    after = run(core)["good"]
    fresh, _ = make(async_scheduling)
    fresh.add(request("good", 1, size=500))
    assert token_ids(after) == token_ids(run(fresh)["good"])


@MODES
def test_aborted_and_finished_requests_give_no_more_news(async_scheduling: bool) -> None:
    core, _ = make(async_scheduling)
    for seed, name in enumerate(("stays", "aborted", "stopped")):
        core.add(request(name, seed, max_tokens=20))
    for _ in range(3):
        core.step()
    assert core.scheduler.abort("aborted") and not core.scheduler.abort("unknown")
    core.scheduler.abort("stopped")
    assert set(run(core)) == {"stays"}
    assert not core.scheduler.abort("aborted")
    core.reset_prefix_cache()
    assert not core.scheduler.stats().cache.num_cached_blocks


@MODES
def test_drain_finishes_what_was_submitted(async_scheduling: bool) -> None:
    core, runner = make(async_scheduling)
    core.add(request("r", 1, max_tokens=20))
    core.step()
    core.drain()
    submitted = [step for kind, step in runner.events if kind == "submit"]
    assert [step for kind, step in runner.events if kind == "result"] == submitted


def test_a_refused_plan_stops_the_engine() -> None:
    core, runner = make(False)
    core.add(request("r", 1))
    runner.refuse = True
    with pytest.raises(EngineStoppedError, match="row 3 is not in the batch"):
        core.step()
    with pytest.raises(EngineStoppedError, match="closed"):
        core.add(request("s", 2))


def test_counts_what_entered_the_model() -> None:
    core, runner = make(False)
    core.add(request("r", 1, size=100, max_tokens=6))
    run(core)
    assert core.num_model_tokens == runner.num_tokens == 105
    assert core.slot_bytes_copied == 0


def test_close_releases_the_runner_once() -> None:
    core, runner = make(False)
    core.close()
    core.close()
    assert runner.closed
    with pytest.raises(EngineStoppedError):
        core.step()


@MODES
def test_the_host_may_work_while_the_device_does(async_scheduling: bool) -> None:
    core, runner = make(async_scheduling)
    core.add(request("r", 1))
    while core.has_unfinished():
        core.step(lambda: runner.events.append(("meanwhile", -1)))
    kinds = [kind for kind, _ in runner.events]
    assert kinds.count("meanwhile") == kinds.count("result")
    assert all(kinds[i + 1] == "result" for i, kind in enumerate(kinds) if kind == "meanwhile")
    assert kinds[: kinds.index("meanwhile")] == ["submit"] * (2 if async_scheduling else 1)

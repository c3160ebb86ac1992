"""The simulator makes the engine's own decisions; time, routing and accounting around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import DiskFacts, no_entries
from forkpoint.cache.tiers import TierSizes
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.engine.core import EngineCore
from forkpoint.errors import ConfigError
from forkpoint.params import SamplingParams
from forkpoint.routing.router import Router
from forkpoint.sched.plan import StepPlan
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler
from forkpoint.sim.cases import Case, run_cases
from forkpoint.sim.cost import H200, CostModel, StepLoad
from forkpoint.sim.engine_replica import EngineOptions, EngineReplica, load_of
from forkpoint.sim.named_systems import engine_options, make_system
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B, ModelShape
from forkpoint.sim.simulator import SimulationResult, Simulator
from forkpoint.sim.tokens import TokenSpans
from forkpoint.sim.trace import Trace, TraceRequest
from forkpoint.sim.workload import make_workload
from tests.cache.shapes import attention
from tests.hash_runner import HashRunner
from tests.sched.harness import HYBRIDS, WINDOWED, WITH_WINDOWS
from tests.sim.driving import fresh, join, prefill_s, request, reused_by_talk, take_turns

VOCAB = 5000
SCHEDULER = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=6)
COST, MODEL = QWEN3_5_9B.recompute_cost, CostModel(QWEN3_5_9B, H200)


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    num_outputs: int
    step: int  # when it arrives, in steps


@st.composite
def asks_strategy(draw: st.DrawFn) -> list[Ask]:
    """Prompts that share trunks and continue each other's beginnings."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    trunks = [rng.integers(0, VOCAB, 900).tolist() for _ in range(3)]
    asks: list[Ask] = []
    for _ in range(draw(st.integers(2, 14))):
        trunk = trunks[draw(st.integers(0, 2))]
        own = rng.integers(0, VOCAB, draw(st.integers(1, 200))).tolist()
        prompt = trunk[: draw(st.integers(0, 14)) * 64] + own
        asks.append(Ask(tuple(prompt), draw(st.integers(1, 150)), draw(st.integers(0, 60))))
    return sorted(asks, key=lambda ask: ask.step)


def shown(plan: StepPlan) -> tuple[object, ...]:
    """All that a plan decides."""
    rows = plan.rows
    places = (rows.row, rows.start, rows.num_tokens, rows.read_slot, rows.write_slot)
    parts = (rows.block_ptr, rows.new_blocks, rows.save_ptr, rows.save_positions, rows.save_slots)
    return (
        plan.removed,
        plan.moves,
        tuple((row.row, row.request_id, ids(row.block_ids, *row.more_block_ids)) for row in plan.added),
        tuple((item.row, ids(item.block_ids, *item.more_block_ids)) for item in plan.replaced),
        ids(*places, *parts, *rows.more_blocks),
    )


def ids(*arrays: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(array.tolist()) for array in arrays)


class Watched(HashRunner):
    """A runner whose steps take, on a clock of its own, what the cost model says."""

    def __init__(self, layout: CacheLayout, num_pages: int, num_host_pages: int, num_disk_pages: int) -> None:
        super().__init__(layout, num_pages, VOCAB, num_host_pages, num_disk_pages)
        self.plans: list[tuple[object, ...]] = []
        self.now_s = 0.0

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        self.plans.append(shown(plan))
        self.now_s += MODEL.step_s(load_of(plan, self.layout))
        return super().submit(plan)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from([*HYBRIDS, *WINDOWED]),
    asks=asks_strategy(),
    tokens=st.integers(1400, 6000),
    num_host_pages=st.sampled_from([0, 8, 300]),
    num_disk_pages=st.sampled_from([0, 8, 300]),
    limit_ms=st.sampled_from([None, 8, 12]),
    weighs_disk=st.booleans(),
)
def test_simulator_and_engine_decide_alike(
    name: str,
    asks: list[Ask],
    tokens: int,
    num_host_pages: int,
    num_disk_pages: int,
    limit_ms: int | None,
    weighs_disk: bool,
) -> None:
    """The same requests at the same steps: every plan is the same, block by block and slot by slot."""
    layout, config = WITH_WINDOWS[name], replace(SCHEDULER, max_inter_token_latency_ms=limit_ms)
    num_pages = layout.num_pages_for(tokens, 4) + 1
    runner = Watched(layout, num_pages, num_host_pages, num_disk_pages)
    clock = lambda: runner.now_s  # noqa: E731
    disk = DiskFacts(num_disk_pages, no_entries()) if num_disk_pages else None
    tiers = TierSizes(num_host_pages, disk, weighs_disk=weighs_disk)
    scheduler = Scheduler(layout, num_pages, CacheConfig(), config, cost=COST, tiers=tiers, clock=clock)
    core = EngineCore(scheduler, runner)
    requests = {}
    for index, ask in enumerate(asks):
        params = SamplingParams(temperature=0.0, max_tokens=ask.num_outputs, ignore_eos=True)
        prompt = np.asarray(ask.prompt, np.int32)
        opens_call = frozenset(range(0, VOCAB, 50))  # some answers contain one
        requests[f"r{index}"] = Request(
            f"r{index}", prompt, params, ask.num_outputs, seed=0, tool_call_token_ids=opens_call
        )
    step = 0
    waiting = list(zip(asks, requests.values(), strict=True))
    while waiting or core.has_unfinished():
        while waiting and waiting[0][0].step <= step:
            core.add(waiting.pop(0)[1])
        core.step()
        step += 1

    options = EngineOptions(layout, num_pages, CacheConfig(), config, COST, tiers=tiers, disk_rate=math.inf)
    system, now_s = EngineReplica(options), 0.0
    plans = []
    plan_step = system.sched.schedule

    def watched() -> StepPlan | None:
        plan = plan_step()
        if plan is not None:
            plans.append(shown(plan))
        return plan

    system.sched.schedule = watched  # type: ignore[method-assign]
    step, index = 0, 0
    while index < len(asks) or system.num_unfinished():
        while index < len(asks) and asks[index].step <= step:
            done = requests[f"r{index}"]
            spans = [TokenSpans(tuple((t, 1) for t in ids)) for ids in (asks[index].prompt, done.output_token_ids)]
            assert system.add(replace(request(done.id, *spans), awaits_tool=done.awaits_tool))
            index += 1
        load = system.plan(now_s)
        if load is not None:
            now_s += MODEL.step_s(replace(load, waits_s=0.0))
            for finished, found in system.finish(now_s).finished.items():
                expected = requests[finished].cache
                assert found.num_cached_tokens == expected.num_cached_tokens
                assert found.kv_num_tokens == expected.kv_num_tokens
        step += 1
    assert plans == runner.plans
    assert system.sched.stats() == scheduler.stats()


def test_wide_windows_keep_all_blocks_next_to_a_tier() -> None:
    layers = tuple((replace(attention(4, 128), window=window),) for window in (512, 4096))
    shape = replace(QWEN3_5_9B, layers=layers)
    for options, widths in {"": [512, 4096], "host_memory=9": [512], "disk_memory=9": [512]}.items():
        layout = engine_options(options, shape, 4 << 30, SchedulerConfig()).layout
        assert [group.window for group in layout.windows] == widths
        assert layout.has_kv == (options != "")


@pytest.mark.parametrize(("rate", "is_fast"), [(0.3, False), (1.0, False), (50.0, True)])
def test_a_slow_disk_costs_no_prompt_more_than_a_twentieth(rate: float, is_fast: bool) -> None:
    """Whether the disk is faster than computing becomes known while the first prefix is read."""
    options = engine_options(f"disk_memory=64,disk_rate={rate}", QWEN3_5_9B, 4 << 30, SchedulerConfig())
    system, now_s, times = EngineReplica(options), 0.0, list[float]()
    prompts = [fresh(16384) for _ in range(8)]  # four of them fill the arena
    for number, prompt in enumerate([*prompts, *prompts[:3]]):
        began_s = now_s
        assert system.add(request(f"r{number}", join(prompt, fresh(1))))
        while (load := system.plan(now_s)) is not None:
            now_s += MODEL.step_s(load)
            for report in system.finish(now_s).finished.values():
                if number == len(prompts):
                    assert (report.num_restored_tokens > 0) == is_fast
        times.append(now_s - began_s)
        now_s += 10.0  # the disk writes meanwhile
    cold_s = float(np.median(times[: len(prompts)]))
    ratios = [seconds / cold_s for seconds in times[len(prompts) :]]
    assert max(ratios) <= (0.3 if is_fast else 1.05), ratios


def streamed(shape: ModelShape, limit_ms: int | None, spread: float) -> tuple[float, float]:
    """Serve 64 streams of two requests each, of 1,024 tokens and 128 outputs, whose steps take longer or shorter by
    chance. Return (99th percentile of the milliseconds between tokens, tokens per second)."""
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256, max_inter_token_latency_ms=limit_ms)
    system = EngineReplica(EngineOptions(shape.layout, 20_000, CacheConfig(), scheduler, shape.recompute_cost))
    model, rng = CostModel(shape, H200), np.random.default_rng(0)
    waiting, now_s, gaps = [request(f"r{i}", fresh(1024), 128) for i in range(128)], 0.0, list[float]()
    for _ in range(64):
        assert system.add(waiting.pop())
    while (load := system.plan(now_s)) is not None:
        elapsed_s = model.step_s(load) * float(np.exp(spread * rng.standard_normal()))
        now_s += elapsed_s
        gaps += [elapsed_s * 1000] * load.num_decodes
        for _ in system.finish(now_s).finished:
            if waiting:
                assert system.add(waiting.pop())
    return float(np.percentile(gaps, 99)), len(gaps) / now_s


@pytest.mark.parametrize(("shape", "spread"), [(QWEN3_5_35B, 0.0), (QWEN3_5_35B, 0.1), (QWEN3_5_9B, 0.1)])
def test_prompts_leave_the_time_between_tokens_within_its_limit(shape: ModelShape, spread: float) -> None:
    """At 90 % of the throughput without the limit, or more."""
    unlimited_ms, unlimited_rate = streamed(shape, None, spread)
    found_ms, rate = streamed(shape, 50, spread)
    assert unlimited_ms > 60 and found_ms <= 50
    assert rate >= 0.9 * unlimited_rate


def simulate(trace: Trace, replicas: int = 1, router: str = "round-robin") -> SimulationResult:
    layout = QWEN3_5_9B.layout
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    options = EngineOptions(layout, (16 << 30) // layout.page_bytes, CacheConfig(), scheduler, COST)
    systems = [EngineReplica(options) for _ in range(replicas)]
    return Simulator(trace, systems, CostModel(QWEN3_5_9B, H200), Router(router)).run()


def test_a_request_alone_takes_what_its_steps_take() -> None:
    result = simulate(Trace("one", (request("a", fresh(20_000), 5, arrival_s=3.0),)))
    record, model = result.records[0], CostModel(QWEN3_5_9B, H200)
    assert record.first_token_s is not None and record.finished_s is not None and record.ttft_s is not None
    chunks = [prefill_s(model, *part) for part in ((0, 8192), (8192, 16_384), (16_384, 20_000))]
    assert record.ttft_s == pytest.approx(sum(chunks), rel=0.03)
    assert result.num_steps == 7 and result.elapsed_s == record.finished_s > 3.0 + record.ttft_s
    assert result.counters[0].kv_written_bytes == 20_004 * QWEN3_5_9B.kv_token_bytes


def test_drafts_of_which_a_set_number_is_right() -> None:
    """A prompt of 100 and 24 outputs, 2.5 tokens a step with 2 drafts: 1 + 2 + 3 + 2 + 3 ..., by hand; the last step
    has room for none."""
    options = "acceptance_length=2.5,num_speculative_tokens=2"
    system = make_system(f"forkpoint:{options}", QWEN3_5_9B, 8 << 30, SchedulerConfig())
    trace = Trace("one", (request("a", fresh(100), 24),))
    model = CostModel(QWEN3_5_9B, H200)
    result = Simulator(trace, [system], model, Router("round-robin")).run()
    seconds = [model.step_s(StepLoad(100, 100 * 100 / 2, num_segments=1, num_saves=1, num_sampled=1))]  # state of 64
    position = 100
    for confirmed, drafts in zip([2, 3] * 4 + [2, 1], [2] * 9 + [0], strict=True):
        tokens = drafts + 1
        seen = tokens * position + tokens * (tokens + 1) // 2  # keys
        load = StepLoad(num_decodes=1, num_drafts=drafts, decode_kv_tokens=seen, num_sampled=tokens)
        seconds.append(model.step_s(load))
        position += confirmed
    assert position == 123
    assert result.num_steps == len(seconds) and result.elapsed_s == pytest.approx(sum(seconds))


def test_drafts_yield_to_prompts() -> None:
    """Requests with long prompts and short answers, all at once. Drafts that are never right cost them next to nothing,
    because prompts fill most steps; right ones help in the other steps."""
    trace = Trace("mixed", tuple(request(f"{i}", fresh(1000 + 131 * (i % 17)), fresh(4 + i % 29)) for i in range(60)))
    scheduler = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=32)

    def seconds(system: str) -> float:
        replica = make_system(system, QWEN3_5_9B, 60 << 30, scheduler)
        return Simulator(trace, [replica], MODEL, Router("round-robin")).run().busy_s

    plain = seconds("forkpoint")
    assert seconds("forkpoint:num_speculative_tokens=3,acceptance_length=1") < 1.01 * plain
    assert seconds("forkpoint:num_speculative_tokens=3,acceptance_length=3") < plain


def test_drafts_change_what_is_cached_and_when_nothing_else() -> None:
    """All requests get all their tokens in fewer steps, and reuse as much."""
    trace = make_workload("chat:sessions=12,turns=4,answer=100")
    plain, drafted = (
        Simulator(
            trace,
            [make_system(name, QWEN3_5_9B, 4 << 30, SCHEDULER)],
            CostModel(QWEN3_5_9B, H200),
            Router("round-robin"),
        ).run()
        for name in ("forkpoint", "forkpoint:num_speculative_tokens=3,acceptance_length=2.44")
    )
    assert all(record.finished_s is not None for record in drafted.records)
    assert drafted.busy_s < plain.busy_s and drafted.num_steps < plain.num_steps
    reused = [sum(record.cache.num_cached_tokens for record in result.records) for result in (plain, drafted)]
    assert abs(reused[0] - reused[1]) <= 0.02 * reused[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("acceptance_length=3", "num_speculative_tokens=0 is not allowed"),
        ("acceptance_length=4.5,num_speculative_tokens=3", "with 3 drafts give 1 to 4"),
        ("acceptance_length=nan,num_speculative_tokens=3", "with 3 drafts give 1 to 4"),
        ("acceptance_length=x", "are not numbers"),
        ("num_speculative_tokens=64", "give 1 to 63"),
        ("acceptance=2", "no option .acceptance=2. of forkpoint; give capture=.*, host_memory=.*, disk_rate=.*, acc"),
    ],
)
def test_drafts_that_cannot_be(options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_system(f"forkpoint:{options}", QWEN3_5_9B, 8 << 30, SCHEDULER)


def test_a_turn_waits_for_the_one_before_and_for_the_user() -> None:
    first, answer = fresh(5000), fresh(300)
    second = request("b", join(first, answer, fresh(100)), 10, after="a", think_s=7.0)
    result = simulate(Trace("two", (request("a", first, answer), second)))
    a, b = result.records
    assert a.finished_s is not None and b.arrival_s == a.finished_s + 7.0
    assert b.cache.num_cached_tokens == 5248


def test_scaling_and_sampling() -> None:
    trace = make_workload("chat:sessions=40,turns=3")
    slower = trace.scaled(arrivals=2.0, think=3.0)
    assert [r.arrival_s for r in slower.requests] == [2 * r.arrival_s for r in trace.requests]
    assert [r.think_s for r in slower.requests] == [3 * r.think_s for r in trace.requests]
    sample = trace.sample(0.5)
    sessions = {r.session for r in sample.requests}
    assert 8 < len(sessions) < 32
    assert [r for r in trace.requests if r.session in sessions] == list(sample.requests)
    short = trace.within(1500)
    assert all(r.prompt.num_tokens + r.output.num_tokens <= 1500 for r in short.requests)
    assert {r.after for r in short.requests} <= {r.id for r in short.requests} | {None}


def test_replicas_share_the_load_and_prefix_aware_routing_finds_the_replica_of_a_conversation() -> None:
    trace = make_workload("chat:sessions=30,turns=5,first=1500,answer=50,gap_s=0.1,think_s=1.5")
    hits: dict[str, int] = {}
    for router in ("round-robin", "least-loaded", "prefix-aware"):
        result = simulate(trace, replicas=3, router=router)
        served = [sum(record.replica == index for record in result.records) for index in range(3)]
        assert sum(served) == len(trace.requests) and min(served) > len(trace.requests) / 8
        hits[router] = sum(record.cache.num_cached_tokens for record in result.records)
    assert hits["prefix-aware"] > 1.2 * hits["round-robin"]


def test_cases_in_processes_give_the_same() -> None:
    trace = make_workload("chat:sessions=6,turns=3,answer=60")
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    cases = [
        Case(trace, QWEN3_5_9B, H200, name, 8 << 30, scheduler)
        for name in ("forkpoint", "forkpoint:eviction=lru", "forkpoint")
    ]
    counted: list[int] = []
    assert run_cases(cases, jobs=2, progress=counted.append) == run_cases(cases, jobs=1)
    assert counted == [1] * 3 * len(trace.requests), "progress comes while a case runs"


def room_beside(layout: CacheLayout, num_pages: int, running: TraceRequest) -> int:
    """Tokens of keys and values that the other conversation can keep while `running` runs, which needs its own, its
    running slot and the state it resumed from; the other one needs a state too. Page 0 is reserved."""
    blocks = layout.num_blocks_for(running.prompt.num_tokens + running.output.num_tokens)
    pages = num_pages - 1 - -(-3 // layout.slots_per_page)
    return (pages * layout.blocks_per_page - blocks) * BLOCK_SIZE


@pytest.mark.parametrize("shape", [QWEN3_5_9B, QWEN3_5_35B, KIMI_LINEAR], ids=lambda shape: shape.name)
def test_two_alternating_conversations_in_too_little_memory(shape: ModelShape) -> None:
    """In room for 60 to 95 % of both, a part stays wherever one state's distance of it can stay beside a running
    request: more than a third of all prompts is reused. Below that nothing worth a state fits."""
    requests = take_turns(100, 100, num_turns=14)
    layout, scheduler = shape.layout, SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    whole = 2 * (requests[-1].prompt.num_tokens * shape.kv_token_bytes + 2 * layout.slot_bytes)
    num_fitting = 0
    for percent in range(60, 100, 5):
        num_pages = whole * percent // 100 // layout.page_bytes
        if room_beside(layout, num_pages, requests[-1]) < layout.fallback_step(num_pages):
            continue
        num_fitting += 1
        system = EngineReplica(EngineOptions(layout, num_pages, CacheConfig(), scheduler, shape.recompute_cost))
        assert sum(reused_by_talk(requests, shape, system)) / 2 > 0.334, percent
    assert num_fitting >= 1

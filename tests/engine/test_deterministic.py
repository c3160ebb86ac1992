"""`--deterministic` on real models: every logit that is sampled from is, bit for bit, that of the request alone with
the cache off: in any batch, any order of arrival, across preemption, from a hit or cold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.lease import Lease
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler
from tests.checkpoints import write_checkpoint
from tests.engine.probe import watch_logits

MIX = ["linear_attention", "full_attention", "linear_attention"]
SMALL: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**SMALL, "layer_types": MIX},
    "qwen3_next_moe": {**SMALL, "layer_types": MIX},
    "qwen3_5": {**SMALL, "layer_types": MIX},
    "olmo_hybrid": {**SMALL, "num_hidden_layers": 4, "layer_types": [*MIX[:2], *MIX[:2]]},
    "qwen3": SMALL,
}
BUDGET = 192
MAX_LEN = 1024
NO_CACHE = CacheConfig(enable_prefix_caching=False)
Log = dict[tuple[str, int], Tensor]  # (request, tokens before) -> logits


class Serving:
    """A scheduler and a runner in deterministic mode; the logits of every sampled token are kept."""

    def __init__(
        self,
        model: Model,
        ops: Any,
        cache: CacheConfig,
        num_pages: int = 0,
        async_scheduling: bool = False,
        rows: int = 8,
    ) -> None:
        layout = CacheLayout.create(model.layer_specs)
        num_pages = num_pages or layout.num_pages_for(16 * MAX_LEN, 64) + 1
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=rows)
        self.layout = layout
        loaded = Loaded(model, ops, layout, config, CpuPlatform())
        self.runner = ModelRunner(loaded, num_pages)
        self.runner.arena.data.fill_(0xFF)  # NaN in every dtype
        self.sched = Scheduler(layout, num_pages, cache, config, deterministic=True)
        self.log: Log = {}
        self.requests: dict[str, Request] = {}
        self._rows: dict[int, str] = {}
        self._async_scheduling = async_scheduling
        self._in_flight: list[Any] = []
        watch_logits(self.runner, self._note)

    def _note(self, row: int, num_outputs: int, logits: Tensor) -> None:
        self.log[self._rows[row], num_outputs] = logits.clone()

    def add(self, name: str, prompt: IntArray, max_tokens: int, priority: int = 0) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(name, prompt, params, max_tokens, seed=0, priority=priority)
        self.requests[name] = request
        self.sched.add(request)

    def step(self) -> bool:
        plan = self.sched.schedule()
        if plan is not None:
            for added in plan.added:
                self._rows[added.row] = added.request_id
            self._in_flight.append(self.runner.submit(plan))
        while len(self._in_flight) > (1 if self._async_scheduling and plan is not None else 0):
            self.sched.apply(self._in_flight.pop(0).result())
        self.sched.check_integrity()
        return plan is not None or bool(self._in_flight)

    def run(self) -> None:
        while self.step():
            pass
        assert not self.sched.has_unfinished()

    def ask(self, name: str, prompt: IntArray, max_tokens: int) -> Request:
        self.add(name, prompt, max_tokens)
        self.run()
        return self.requests[name]


class Bench:
    """One model with its operators, and what each prompt gives when it is alone and nothing is cached."""

    def __init__(self, model: Model, ops: Any, async_scheduling: bool) -> None:
        """`async_scheduling` is that of tests which preempt."""
        self.model, self.ops, self.async_scheduling = model, ops, async_scheduling
        self._alone: dict[tuple[bytes, int], tuple[list[int], list[Tensor]]] = {}

    def serve(self, cache: CacheConfig | None = None, **options: Any) -> Serving:
        return Serving(self.model, self.ops, cache or CacheConfig(checkpoint_interval=64), **options)

    def check(self, serving: Serving, name: str) -> None:
        request = serving.requests[name]
        key = request.prompt_token_ids.tobytes(), request.max_tokens
        if key not in self._alone:
            cold = self.serve(NO_CACHE)
            outputs = cold.ask("alone", request.prompt_token_ids, request.max_tokens).output_token_ids
            self._alone[key] = outputs, [cold.log["alone", i] for i in range(len(outputs))]
        outputs, logits = self._alone[key]
        assert request.output_token_ids == outputs, f"{name}: tokens differ"
        for i, expected in enumerate(logits):
            assert torch.equal(serving.log[name, i], expected), f"{name}: logits of output {i} differ in their bits"


# Each operator table in each dtype, and experts in float32, as rounding to bfloat16 hides differences. The first model
# has states in bfloat16 and two threads.
CASES = [
    ("qwen3_next", "torch", "float32"),
    ("qwen3_next_moe", "torch", "float32"),
    ("qwen3_next_moe", "cpp", "float32"),
    ("qwen3_next_moe", "cpp", "bfloat16"),
    ("olmo_hybrid", "torch", "bfloat16"),
    ("olmo_hybrid", "cpp", "float32"),
    ("qwen3_5", "torch", "float32"),
    ("qwen3", "cpp", "bfloat16"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def bench(
    request: pytest.FixtureRequest, one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    model, cpu_ops, dtype = request.param
    try:
        ops = select_table(cpu_ops, True, False)
    except ConfigError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.getbasetemp() / f"deterministic-{model}"
    if not path.exists():
        write_checkpoint(path, model, **MODELS[model])
    state_dtype = "bfloat16" if model == "qwen3_next" else "float32"
    torch.set_num_threads(2 if model == "qwen3_next" else 1)
    loaded = load_model(path, ops=ops, dtype=dtype, state_dtype=state_dtype)
    yield Bench(loaded, ops, async_scheduling=CASES.index(request.param) % 2 == 1)
    torch.set_num_threads(1)


def tokens(seed: int, count: int) -> IntArray:
    return np.random.default_rng(seed).integers(2, 256, count, dtype=np.int32)


def join(*parts: IntArray | list[int]) -> IntArray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


TRUNK = tokens(1, 256)
PROMPTS = [
    join(TRUNK, tokens(2, 65)),
    join(TRUNK, tokens(3, 1)),
    join(TRUNK[:140], tokens(4, 110)),
    TRUNK[:192],
    TRUNK[:65],
    tokens(5, 1),
    tokens(6, 63),
    TRUNK,
]


def test_hits(bench: Bench) -> None:
    """One after the other: each prompt finds what those before it left."""
    serving = bench.serve()
    cached = []
    for index, prompt in enumerate([*PROMPTS, *PROMPTS]):
        cached.append(serving.ask(f"r{index}", prompt, 3).cache.num_cached_tokens)
        bench.check(serving, f"r{index}")
    assert cached[len(PROMPTS) :] == [320, 256, 192, 128, 64, 0, 0, 192]


def test_next_turns(bench: Bench) -> None:
    """A prompt that contains an answer: what the answer's decode steps made is not for others."""
    serving, history = bench.serve(), tokens(7, 110)
    for turn in range(3):
        request = serving.ask(f"turn {turn}", history, 20)
        bench.check(serving, f"turn {turn}")
        history = join(history, request.output_token_ids, tokens(turn, 30))


@pytest.mark.parametrize(("order", "async_scheduling"), [("reversed", True), ("spread out", False)])
def test_any_batch_in_any_order(bench: Bench, order: str, async_scheduling: bool) -> None:
    serving = bench.serve(async_scheduling=async_scheduling)
    names = [f"r{index}" for index in range(len(PROMPTS))]
    for index in range(len(PROMPTS))[:: -1 if order == "reversed" else 1]:
        serving.add(names[index], PROMPTS[index], 2 + 2 * (index % 4))
        for _ in range(index if order == "spread out" else 0):
            serving.step()
    serving.run()
    for name in names:
        bench.check(serving, name)


def test_preemption(bench: Bench) -> None:
    """Requests that are pushed out while decoding and in prefill, and resume from what they left, or replay."""
    serving = bench.serve(async_scheduling=bench.async_scheduling)
    prompts = [PROMPTS[1], tokens(8, 120), tokens(9, 50)]
    for index, prompt in enumerate(prompts):
        serving.add(f"r{index}", prompt, 16)
    pushed = 0
    for count in range(1, 400):
        if not serving.step():
            break
        running = serving.sched._running.requests
        if count % 7 == 0 and len(running) > 1:
            serving.sched._departures.preempt(running[count % len(running)])
            pushed += 1
        if count == 15:
            serving.sched.reset_prefix_cache()  # what was left is gone: outputs are replayed
    serving.run()
    assert pushed >= 3 and sum(request.num_preemptions for request in serving.requests.values()) >= 3
    for index in range(3):
        bench.check(serving, f"r{index}")


def test_tiny_arena(bench: Bench) -> None:
    """The arena is so small that requests wait for each other, and cached blocks and states are evicted."""
    layout = bench.serve().layout
    serving = bench.serve(num_pages=layout.num_pages_for(4 * 64, 3) + 1)
    for index in range(6):
        serving.add(f"r{index}", tokens(20 + index, 58 + 15 * index), 12)
    serving.run()
    stats = serving.sched.stats().cache
    assert stats.blocks_evicted + sum(stats.checkpoints_evicted.values()) > 0
    for index in range(6):
        bench.check(serving, f"r{index}")


def test_the_check_can_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that starts from the zero state instead of the checkpoint changes the logits."""
    serving = bench.serve()
    if not serving.layout.has_states:
        pytest.skip("a model without states")
    serving.ask("first", PROMPTS[0], 2)
    read: Callable[[Lease], int] = Lease.read_slot.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Lease, "read_slot", property(lambda lease: -1 if lease.read_from else read(lease)))
    serving.ask("second", PROMPTS[0], 2)
    with pytest.raises(AssertionError):
        bench.check(serving, "second")


def test_bfloat16_states_are_refused_with_drafts(tmp_path: Path) -> None:
    from forkpoint.config import EngineConfig

    options: dict[str, Any] = {"deterministic": True, "mamba_ssm_cache_dtype": "bfloat16"}
    EngineConfig.from_flat(model=str(tmp_path), **options)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="mamba-ssm-cache-dtype float32"):
        EngineConfig.from_flat(model=str(tmp_path), **options, speculative_config=drafts)

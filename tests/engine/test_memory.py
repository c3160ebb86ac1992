"""Room for steps beside the arena, and what is said where memory runs out."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_model import make_random_model
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import EngineConfig, SchedulerConfig
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, EngineStoppedError
from forkpoint.image_families.table import read_image_settings
from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.models.vision import VisionTower
from forkpoint.ops.select import torch_table
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.plan import StepPlan, SubmittedStep
from forkpoint.worker import build, memory
from forkpoint.worker.memory import SAMPLER_BYTES_PER_LOGIT, SLACK_BYTES, bytes_beside_arena, graph_bytes
from forkpoint.worker.trial import full_step_pages, run_full_step, trial_lengths, try_kernels
from tests.conftest import TINY
from tests.image_models import write_vision_checkpoint

SPEC = replace(TINY, max_position_embeddings=512)
OPS = torch_table()
MIB = 1 << 20


class Device(CpuPlatform):
    """A host that passes for a device with memory of its own."""

    def __init__(self, share: int = 512 * MIB, peak: int = 0, fails: bool = False) -> None:
        super().__init__()
        self._share, self._peak, self._fails = share, peak, fails
        self.num_runs = self.num_releases = 0

    def release_unused(self) -> None:
        self.num_releases += 1

    def arena_bytes(self, utilization: float) -> int | None:
        return self._share

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.num_runs += 1
        if self._fails:
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB.\nMore follows")
        run()
        return self._peak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("memory"), SPEC)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, ops=OPS)


@pytest.fixture(scope="module")
def layout(model: Model) -> CacheLayout:
    return CacheLayout.create(model.layer_specs)


@pytest.mark.parametrize(("budget", "rows"), [(256, 8), (1200, 8), (1200, 2), (64, 1)])
def test_a_full_step_is_one_step_of_the_whole_budget(
    model: Model, layout: CacheLayout, budget: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepPlan] = []
    submit = ModelRunner.submit

    def noting(runner: ModelRunner, plan: StepPlan) -> SubmittedStep:
        steps.append(plan)
        return submit(runner, plan)

    monkeypatch.setattr(ModelRunner, "submit", noting)
    sched = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=rows)
    run_full_step(Loaded(model, OPS, layout, sched, CpuPlatform()))
    assert max(plan.num_tokens for plan in steps) == min(budget, rows * (SPEC.max_position_embeddings - 1))
    assert len(steps) == 1


def test_a_full_step_is_of_as_many_prompts_as_pages_hold(
    model: Model, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepPlan] = []
    submit = ModelRunner.submit
    monkeypatch.setattr(ModelRunner, "submit", lambda runner, plan: steps.append(plan) or submit(runner, plan))
    longest = SPEC.max_position_embeddings - 1
    sched = SchedulerConfig(max_num_batched_tokens=4 * longest, max_num_seqs=8)
    loaded = Loaded(model, OPS, layout, sched, CpuPlatform())
    for count in range(4):
        fewer = replace(sched, max_num_batched_tokens=max(1, count) * longest)
        run_full_step(loaded, full_step_pages(layout, fewer, longest + 1) - (count == 0))
    assert [plan.num_tokens for plan in steps] == [longest, 2 * longest, 3 * longest]


@pytest.mark.parametrize("longest", [1, 2, 63, 64, 510, 511, 512, 700, 4000, 8192])
def test_trial_prompts_become_ever_shorter(longest: int) -> None:
    lengths = trial_lengths(longest, 512)
    assert lengths[0] == longest and lengths[-1] <= 2
    assert all(shorter < length <= 2 * shorter + 3 for length, shorter in pairwise(lengths) if length > 1)
    assert longest < 512 or 511 in lengths, "one more row, and launches still overlap"


def test_kernels_are_tried_on_long_prompts_sampled_in_every_way(
    model: Model, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepPlan] = []
    submit, sampled = ModelRunner.submit, []

    def noting(runner: ModelRunner, plan: StepPlan) -> SubmittedStep:
        steps.append(plan)
        sampled.extend(added.params for added in plan.added)
        return submit(runner, plan)

    monkeypatch.setattr(ModelRunner, "submit", noting)
    sched = SchedulerConfig(max_num_batched_tokens=200, max_num_seqs=4)
    loaded = Loaded(model, OPS, layout, sched, CpuPlatform(), [StepShape(0, 48, 1)])
    try_kernels(loaded)
    assert {int(count) for plan in steps for count in plan.rows.num_tokens} >= {100, 49, 35}
    assert max(plan.num_tokens for plan in steps) < 200, "what measures memory runs a full step"
    assert any(0 < plan.num_decodes < len(plan.rows) for plan in steps), "a row decodes beside a prompt"
    assert any(params.temperature > 0 for params in sampled) and any(params.logit_bias for params in sampled)
    assert any(params.repetition_penalty != 1 for params in sampled)
    assert any(plan.masks is not None for plan in steps)
    try_kernels(loaded, 100 * layout.num_pages_for(200, 1))
    assert max(plan.num_tokens for plan in steps) > 128, "nothing measures memory"
    most = layout.num_pages_for(200, 1)
    steps.clear()
    try_kernels(loaded, most)
    assert steps and max(plan.num_tokens for plan in steps) < 100, "no longer than the arena that was asked for"


def test_the_room_beside_the_arena(model: Model, layout: CacheLayout) -> None:
    sched = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4)
    arena = full_step_pages(layout, sched, SPEC.max_position_embeddings) * layout.page_bytes
    logits = 4 * model.config.vocab_size * SAMPLER_BYTES_PER_LOGIT
    device = Device(peak=arena + 10_000)
    assert bytes_beside_arena(Loaded(model, OPS, layout, sched, device)) == 10_000 + logits + SLACK_BYTES
    assert device.num_runs == 1


def test_graphs_have_room_for_more_tokens_than_the_rows_allow(
    model: Model, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two short rows make no step of 8,192 tokens, but a graph of so many tokens has their activations."""
    monkeypatch.setattr(memory, "graph_bytes", lambda loaded: 0)
    sched, most = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=2), SPEC.max_position_embeddings
    arena, num_tokens = full_step_pages(layout, sched, most) * layout.page_bytes, 2 * (most - 1)
    loaded = Loaded(model, OPS, layout, sched, Device(peak=arena + num_tokens * MIB))
    recorded = bytes_beside_arena(replace(loaded, shapes=[StepShape(0, 8192, 4)])) - bytes_beside_arena(loaded)
    assert recorded == 8192 * MIB


def test_no_graph_has_many_more_tokens_than_any_step(model: Model, folder: Path) -> None:
    sched = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=2)
    shapes = build._graph_shapes(EngineConfig(model=str(folder)), sched, model, 0)
    assert max(shape.num_tokens for shape in shapes) == 1024, "1,280 of 1,022 tokens are too many"
    longer = build._graph_shapes(EngineConfig(model=str(folder)), replace(sched, max_num_seqs=8), model, 0)
    assert max(shape.num_tokens for shape in longer) == 4096


def test_the_largest_image_has_room_beside_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embeddings that are kept while a step encodes its budget of images have room beside the arena.

    vllm#38459: limits of images did not change how much memory was set aside for them.
    """
    write_vision_checkpoint(tmp_path)
    settings = read_image_settings(tmp_path, {"max_pixels": 81 * 1024})
    seeing = load_model(tmp_path, ops=OPS, vision=settings)
    tower = seeing.vision
    assert tower is not None and settings is not None
    sched = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4, encoder_cache_size=100)
    loaded = Loaded(seeing, OPS, CacheLayout.create(seeing.layer_specs), sched, Device(peak=MIB))
    blind = Loaded(load_model(tmp_path, ops=OPS), OPS, loaded.layout, sched, Device(peak=MIB))
    sizes, encode = list[int](), type(tower).__call__

    def noting(self: VisionTower, pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(pixels.shape[0] * pixels.shape[1])
        return encode(self, pixels)

    monkeypatch.setattr(type(tower), "__call__", noting)
    for budget, most in ((None, 512), (200, 200), (64, 81)):
        own = replace(sched, max_num_encoder_input_tokens=budget)
        room = bytes_beside_arena(replace(loaded, sched=own)) - bytes_beside_arena(replace(blind, sched=own))
        assert room == MIB + (100 + most) * tower.bytes_per_token
    assert sizes == [81 * 1024] * 3


def test_graphs_are_measured_after_what_they_share(
    model: Model, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([900, 300, 299, 39])  # free before and after the first graphs, then the second

    class Recorder(Device):
        def free_bytes(self) -> int:
            return next(taken) * MIB

    shapes = [StepShape(0, tokens, 1) for tokens in range(130, 0, -1)]
    recorded: list[ModelRunner] = []
    monkeypatch.setattr(ModelRunner, "record_next", lambda runner: recorded.append(runner))
    device = Recorder()
    found = graph_bytes(Loaded(model, OPS, layout, SchedulerConfig(), device, shapes))
    assert found == 260 * MIB // 5 and len(recorded) == 2 and device.num_releases == 1
    assert graph_bytes(Loaded(model, OPS, layout, SchedulerConfig(), device)) == 0


def test_the_arena_leaves_that_room(folder: Path, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    sched = SchedulerConfig()
    arena = full_step_pages(layout, sched, SPEC.max_position_embeddings) * layout.page_bytes
    pages = {}
    for peak in (arena, arena + 10 * MIB):
        with _started(folder, Device(peak=peak), monkeypatch) as llm:
            pages[peak] = llm.get_metrics()["num_pages"]
    assert pages[arena] - pages[arena + 10 * MIB] == pytest.approx(10 * MIB / layout.page_bytes, abs=1)


def test_exhaustion_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"running a full step; lower max_num_batched_tokens=2048.*allocate 1 GiB.\)"):
        _started(folder, Device(fails=True), monkeypatch)
    with pytest.raises(ConfigError, match="beside weights and activations: that leaves no room"):
        _started(folder, Device(share=1000), monkeypatch)

    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate")

    monkeypatch.setattr(ModelRunner, "__init__", full)
    with pytest.raises(ConfigError, match=r"allocating an arena of .* GiB; lower kv_cache_memory_bytes"):
        _started(folder, CpuPlatform(), monkeypatch)
    monkeypatch.setattr(build, "load_model", full)
    with pytest.raises(ConfigError, match=r"loading the weights .* were free.; use a smaller"):
        _started(folder, CpuPlatform(), monkeypatch)


def test_an_arena_below_the_longest_request_is_told(
    folder: Path, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 3 * layout.page_bytes
    longest = layout.longest_request(3)
    assert 0 < longest < SPEC.max_position_embeddings
    with _started(folder, CpuPlatform(), monkeypatch, kv_cache_memory_bytes=size, log_level="warning") as llm:
        assert llm.config.kv_cache_memory_bytes == size
    said = capsys.readouterr().err
    assert f"at most {longest} tokens" in said and f"set max_model_len={longest}" in said
    assert logging.getLogger("forkpoint").level == logging.WARNING


@pytest.mark.parametrize("pages", range(2, 12))
def test_the_longest_request_just_fits(layout: CacheLayout, pages: int) -> None:
    longest = layout.longest_request(pages)
    if longest:
        assert layout.num_pages_for(longest, 1) <= pages - 1
    assert layout.num_pages_for(longest + 1, 1) > pages - 1


def test_a_closed_engine_holds_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until Python's cycle collector runs."""
    device = Device(peak=full_step_bytes(folder))
    llm = _started(folder, device, monkeypatch)
    runner = llm._engine.core._runner
    gone = [weakref.ref(runner), weakref.ref(runner.arena.data), weakref.ref(runner._model)]  # type: ignore[attr-defined]
    del runner
    llm.generate([[1, 2, 3]], use_tqdm=False)
    before = llm.get_metrics()
    gc.disable()
    try:
        llm.close()
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()
    assert device.num_releases == 1
    assert llm.get_metrics() == before and before["num_model_tokens"] == 18
    llm.close()
    with pytest.raises(EngineStoppedError):
        llm.generate([[1]], use_tqdm=False)
    assert device.num_releases == 1


def full_step_bytes(folder: Path) -> int:
    model = load_model(folder, ops=OPS)
    layout = CacheLayout.create(model.layer_specs)
    return full_step_pages(layout, SchedulerConfig(), SPEC.max_position_embeddings) * layout.page_bytes


def _started(folder: Path, platform: CpuPlatform, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    monkeypatch.setattr(build, "resolve_platform", lambda name, rank, num_ranks: platform)
    return LLM(str(folder), **{"skip_tokenizer_init": True, "cpu_ops": "torch", "log_level": "error", **options})

"""An engine for benchmarks that takes token ids, returns requests, and gives access to its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.engine.core import EngineCore
from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.platform import Platform
from forkpoint.platforms.table import resolve_platform
from forkpoint.runtime.graphs import graph_shapes
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.sched.scheduler import Scheduler

AMPLE_SLOTS = 256


MAX_PREFILL_GRAPH_TOKENS = 256  # few graphs, since a rig is made for each row of a table


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the operators and the device for which it was loaded."""

    model: Model
    ops: OpTable
    platform: Platform = field(default_factory=CpuPlatform)
    drafter: Drafter | None = None
    max_num_drafts: int = 0  # of a row in a step

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        cpu_ops: str = "torch",
        deterministic: bool = False,
        dtype: str = "auto",
        device: str = "cpu",
        mtp: bool = False,
    ) -> LoadedModel:
        platform = resolve_platform(device)
        ops = select_table(platform.operators(cpu_ops), deterministic, False)
        return cls(load_model(folder, ops=ops, dtype=dtype, device=platform.device, mtp=mtp), ops, platform)

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout.create(self.model.layer_specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RigOptions:
    """Options of a rig. If `num_pages` is 0, there is room for `ample_tokens` tokens and many states."""

    num_pages: int = 0
    ample_tokens: int = 1 << 16
    budget: int = 2048
    max_num_seqs: int = 32
    cache: CacheConfig = field(default_factory=CacheConfig)


class Rig:
    """Scheduler, runner and step loop around a loaded model. Sampling is greedy, and outputs end by length."""

    def __init__(self, loaded: LoadedModel, options: RigOptions) -> None:
        self.layout = layout = loaded.layout
        num_pages = options.num_pages or layout.num_pages_for(options.ample_tokens, AMPLE_SLOTS) + 1
        config = SchedulerConfig(max_num_batched_tokens=options.budget, max_num_seqs=options.max_num_seqs)
        every = graph_shapes(options.max_num_seqs) if loaded.platform.has_graphs else ()
        shapes = tuple(each for each in every if not each.num_segments or each.num_tokens <= MAX_PREFILL_GRAPH_TOKENS)
        ready = Loaded(loaded.model, loaded.ops, layout, config, loaded.platform, shapes, loaded.max_num_drafts)
        runner = ModelRunner(ready, num_pages)
        while runner.record_next():
            pass
        self.sched = Scheduler(
            layout,
            num_pages,
            options.cache,
            config,
            deterministic=loaded.ops.deterministic,
            drafter=loaded.drafter,
        )
        self.core = EngineCore(self.sched, runner)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: IntArray, max_tokens: int, breakpoints: tuple[int, ...] = ()) -> Request:
        """Queue a request. Raises what `EngineCore.add` raises."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, prompt.astype(np.int32), params, max_tokens, seed=0, breakpoints=breakpoints)
        self.core.add(request)
        self.requests[name] = request
        return request

    def step(self) -> list[RequestUpdate]:
        return self.core.step()

    def run(self) -> None:
        """Run until no request is left. Raises the error of a request that failed."""
        while self.core.has_unfinished():
            for update in self.step():
                if update.error is not None:
                    raise update.error

    def ask(self, name: str, prompt: IntArray, max_tokens: int, breakpoints: tuple[int, ...] = ()) -> Request:
        """Add one request and run it to its end."""
        request = self.add(name, prompt, max_tokens, breakpoints)
        self.run()
        return request

    @property
    def checkpoint_bytes(self) -> int:
        return self.sched.stats().cache.num_checkpoints * self.layout.slot_bytes


def random_ids(seed: int, count: int, vocab_size: int) -> IntArray:
    return np.random.default_rng(seed).integers(1, vocab_size, count, dtype=np.int32)

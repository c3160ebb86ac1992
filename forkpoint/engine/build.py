"""From options to a running engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import EngineConfig
from forkpoint.engine.core import EngineCore
from forkpoint.engine.engine import Engine
from forkpoint.engine.inputs import InputProcessor
from forkpoint.engine.sizing import choose_num_pages
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.models.decoder import Model
from forkpoint.models.flops import flops_per_pair, flops_per_token
from forkpoint.models.registry import load_model
from forkpoint.obs.logs import LOGGER, cache_plan_lines, operator_lines, set_up_logging
from forkpoint.ops.select import select_table
from forkpoint.ops.table import STATE_OPERATORS, OpTable
from forkpoint.runtime.graphs import MAX_GRAPH_TOKENS
from forkpoint.runtime.platform import resolve_platform
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.scheduler import Scheduler

Metrics = Callable[[], dict[str, Any]]


def build_engine(config: EngineConfig) -> tuple[Engine, Metrics]:
    """Load the model, cut the arena and start; the second value reads all counters and gauges.

    Raises ConfigError, CheckpointError or UnsupportedModelError.
    """
    set_up_logging(config.log_level)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(config.tokenizer or config.model)
    platform = resolve_platform(config.device)
    ops = select_table(config.cpu_ops, config.deterministic, config.force_state_copy, platform.device.type)
    model = _load(config, ops, platform.device)
    layout = CacheLayout.create(model.kv_specs, model.state_specs)
    max_model_len = model.config.max_model_len
    share = platform.arena_bytes(config.gpu_memory_utilization)
    num_pages = choose_num_pages(layout, max_model_len, config.kv_cache_memory_bytes, platform.free_bytes(), share)
    sched = config.scheduler.resolve(on_gpu=platform.device.type != "cpu")
    runner = ModelRunner(
        model,
        ops,
        layout,
        num_pages,
        max_num_rows=sched.max_num_seqs,
        max_model_len=max_model_len,
        force_state_copy=config.force_state_copy,
        platform=platform,
        max_graph_tokens=0 if config.enforce_eager else MAX_GRAPH_TOKENS,
    )
    scheduler = Scheduler(
        layout,
        num_pages,
        config.cache,
        sched,
        max_model_len=max_model_len,
        deterministic=config.deterministic,
        cost=RecomputeCost(flops_per_token(model.config), flops_per_pair(model.config)),
    )
    _log_start(config, model, ops, cache_plan_lines(layout, num_pages, config, max_model_len))
    runner.capture(partial(tqdm, desc="Capturing graphs", disable=not _shows_progress(config), dynamic_ncols=True))
    core = EngineCore(scheduler, runner, async_scheduling=sched.async_scheduling)
    vocab_size = model.config.vocab_size
    eos = frozenset(token for token in eos_token_ids(config.model, tokenizer) if token < vocab_size)
    engine = Engine(core, InputProcessor(tokenizer, vocab_size, max_model_len, eos, config.seed))

    def metrics() -> dict[str, Any]:
        stats = asdict(scheduler.stats())
        return {
            **stats.pop("cache"),
            **stats,
            "num_model_tokens": core.num_model_tokens,
            "slot_bytes_copied": core.slot_bytes_copied,
            "num_replayed_steps": runner.num_replayed_steps,
        }

    return engine, metrics


def _load(config: EngineConfig, ops: OpTable, device: torch.device) -> Model:
    return load_model(
        config.model,
        ops=ops,
        dtype=config.dtype,
        load_format=config.load_format,
        seed=config.seed,
        state_dtype=config.mamba_ssm_cache_dtype,
        max_model_len=config.max_model_len,
        device=device,
        progress=_shows_progress(config),
    )


def _shows_progress(config: EngineConfig) -> bool:
    return config.log_level in ("debug", "info") and sys.stderr.isatty()


def _log_start(config: EngineConfig, model: Model, ops: OpTable, plan: list[str]) -> None:
    states = f", states {config.mamba_ssm_cache_dtype}" if model.state_specs else ""
    LOGGER.info(
        "model: %s from %s, %d attention and %d recurrent layers, %s%s, %d CPU threads",
        model.config.architecture,
        config.model,
        len(model.kv_specs),
        len(model.state_specs),
        model.config.dtype,
        states,
        torch.get_num_threads(),
    )
    redirects = frozenset() if config.force_state_copy else ops.redirects
    copied = [name for name in STATE_OPERATORS if name not in redirects] if model.state_specs else []
    for line in (*plan, *operator_lines(ops.backends, copied)):
        LOGGER.info(line)
    if config.deterministic:
        LOGGER.info("deterministic: cached and uncached runs agree bit for bit")

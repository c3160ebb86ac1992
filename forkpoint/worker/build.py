"""Builds a worker from the options: device, operators, weights, arena, graphs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import WIDEST_STORED, CacheLayout
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.tier_entries import BUFFERED_AT_ONCE, STORED_AT_ONCE, DiskFacts
from forkpoint.config import GIB, EngineConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.models.decoder import Model
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.registry import load_model
from forkpoint.obs.logs import LOGGER, counted, operator_lines, operators_line
from forkpoint.ops.compile_ahead import compiles_in_parallel, compiling_only
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable, is_torch
from forkpoint.platforms.cpu import free_host_bytes
from forkpoint.platforms.platform import Platform
from forkpoint.platforms.table import resolve_platform
from forkpoint.runtime.graphs import graph_shapes, longest_worth_recording
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.worker.disk import open_disk_tier
from forkpoint.worker.memory import bytes_beside_arena, explained_exhaustion
from forkpoint.worker.peers import open_peer_link
from forkpoint.worker.sizing import choose_num_host_pages, choose_num_pages
from forkpoint.worker.trial import full_step, run_full_step, try_graphs, try_kernels
from forkpoint.worker.weights_progress import WeightsProgress
from forkpoint.worker.worker import Worker, WorkerFacts

# Tokens. Only launched steps compute the keys of long prompts from their latents, which takes fewer operations.
MOST_RECORDED_OF_LATENTS = 4096
LEAST_RECORDED = 16  # rows of a batch; in smaller ones a step that records tokens is slower than one that writes states


def build_worker(config: EngineConfig, rank: int = 0, place: Path | None = None) -> Worker:
    """Load the model, or this rank's share of it, allocate the arena and record graphs.

    Several ranks meet at `place`. Without a device number from the user, rank r takes device r of its kind. Raises
    ConfigError, ModelFolderError or UnsupportedModelError, also if memory runs out or the ranks differ.
    """
    size = config.tensor_parallel_size
    platform = resolve_platform(config.device, rank, size)
    _set_num_threads(config, platform)
    ops = select_table(platform.operators(config.cpu_ops), config.deterministic, config.force_state_copy)
    sched = platform.defaults.with_options(config.scheduler)
    _check_device(config, sched.max_num_seqs, platform)
    ranks = _meet(config, ops, platform, rank, place)
    model = _load(config, ops, platform, ranks, sched.max_num_batched_tokens)
    layout = _make_layout(config, model, platform)
    drafts = _max_num_drafts(config, layout, ops)
    has_graphs = platform.has_graphs and not any(is_torch(ops, name) for name in model.waiting)
    shapes = _graph_shapes(config, sched, model, drafts) if has_graphs else ()
    sizes = replace(model.config, layers=(), draft_layer=()), model.config.flops_per_token, model.config.flops_per_pair
    alike = {"sizes of the model": sizes, "layout of the cache": layout, "shapes of graphs": shapes}
    ranks.check_equal(alike, platform.device)
    interval = _state_write_interval(config, layout, sched.max_num_seqs, platform)
    dealt = (ranks.context, config.interleave)
    runs_before_recording = ranks.size > 1 or not platform.loads_while_recording
    loaded = Loaded(model, ops, layout, sched, platform, shapes, drafts, interval, *dealt, runs_before_recording)
    _log_model(config, loaded)
    if shapes:
        _try_kernels(config, loaded)
    num_pages = ranks.least(_size_arena(config, loaded), platform.device)
    num_host_pages = choose_num_host_pages(layout.in_tiers(), config.host_tier_bytes, size, free_host_bytes())
    runner = _make_runner(loaded, num_pages, num_host_pages)
    disk: DiskFacts | None = None
    if config.kv_disk_path is not None:
        disk = open_disk_tier(config, loaded, runner.arena, ranks)
    peers: PeerFacts | None = None
    if config.links_peers:
        peers = open_peer_link(config, loaded, runner.arena, ranks)
    facts = WorkerFacts(
        layout,
        num_pages,
        model.config.vocab_size,
        model.config.max_model_len,
        sched,
        model.config.flops_per_token,
        model.config.flops_per_pair,
        num_host_pages,
        disk,
        peers,
        platform.has_copy_streams,
        interval,
    )
    runner.arena.copies.start(LOGGER.log)
    return Worker(facts, runner, platform.release_unused, prepare=runner.record_next)


def _graph_shapes(config: EngineConfig, sched: SchedulerConfig, model: Model, num_drafts: int) -> tuple[StepShape, ...]:
    """Return the shapes of the steps to record. Steps that gather keys are not recorded."""
    if config.enforce_eager:
        return ()
    num_sparse = len(model.config.all_of(MoEConfig))
    sizes = (model.config.flops_per_token, len(model.config.layers) - num_sparse, num_sparse)
    longest = longest_worth_recording(*sizes, sum(full_step(sched, model.config.max_model_len)))
    if model.config.all_of(LatentAttentionConfig):
        longest = min(longest, MOST_RECORDED_OF_LATENTS)
    shapes = graph_shapes(sched.max_num_seqs, max_num_drafts=num_drafts, max_prefill_tokens=longest)
    if config.decode_context_parallel_size == 1:
        return shapes
    if config.deterministic:
        return ()
    return tuple(shape for shape in shapes if not shape.num_segments)


def _meet(config: EngineConfig, ops: OpTable, platform: Platform, rank: int, place: Path | None) -> Ranks:
    """Meet the other ranks, which must have the same options and operators. Raises ConfigError."""
    size, context_size = config.tensor_parallel_size, config.decode_context_parallel_size
    if size > 1 and config.deterministic and ops.backends["linear"].startswith("torch"):
        LOGGER.warning(
            "deterministic: torch computes the matrix products here, and may add in another order in a matrix of fewer "
            "rows; the bits of %d ranks may differ from those of one",
            size,
        )
    if place is None:
        return ALONE
    ranks = Ranks.meet(platform.collectives, rank, size, place, config.deterministic, platform.device, context_size)
    ranks.check_equal({"options": config, "operators": ops.backends}, platform.device)
    return ranks


def _make_layout(config: EngineConfig, model: Model, platform: Platform) -> CacheLayout:
    """Return the layout of the arena. Layers with wide windows keep all blocks if there are tiers or peers.

    Raises ConfigError if the model's keys cannot be dealt to ranks.
    """
    longest = model.config.max_model_len
    if _has_tiers_or_peers(config):
        if any(WIDEST_STORED < window < longest for window in _windows(model)):
            LOGGER.info(
                "layers with a window of more than %d tokens keep all blocks: tiers and links to other engines would "
                "hold a whole window with each state",
                WIDEST_STORED,
            )
        longest = min(longest, WIDEST_STORED + 1)
    sizes, dealt_to = platform.traits(platform.device).kernel_block_sizes, config.decode_context_parallel_size
    layout = CacheLayout.create(model.layer_specs, sizes, longest, dealt_to)
    if dealt_to == 1:
        return layout
    why = ""
    if not layout.has_kv:
        why = "for this model, which has no attention to all tokens whose keys could be dealt"
    elif not platform.shares_memory and _windows(model):
        why = f"on {platform.device} for this model: layers with a window need work lists of their own there"
    if why:
        raise ConfigError(f"decode_context_parallel_size={dealt_to} is not possible {why}; leave it out")
    return layout


def _has_tiers_or_peers(config: EngineConfig) -> bool:
    return bool(config.host_tier_bytes or config.disk_tier_bytes or config.links_peers)


def _windows(model: Model) -> list[int]:
    specs = (spec for layer in model.layer_specs for spec in layer)
    return [spec.window for spec in specs if isinstance(spec, KVSpec) and spec.window is not None]


def _try_kernels(config: EngineConfig, loaded: Loaded) -> None:
    """Compile the kernels of all later steps, and run those that graphs do not serve."""
    given, platform = config.kv_cache_memory_bytes, loaded.platform
    most_pages = None if given is None else given // loaded.layout.page_bytes
    remedy = f"lower max_num_batched_tokens={loaded.sched.max_num_batched_tokens}, or give enforce_eager"
    with explained_exhaustion("trying kernels", remedy):
        if compiles_in_parallel():
            num_threads = max(1, (os.cpu_count() or 1) // config.tensor_parallel_size)
            compiling = compiling_only(platform.device, num_threads)
            with _timed("kernels compiled"), compiling, loaded.model.few_layers():
                try_kernels(loaded, most_pages)
                try_graphs(loaded)
                run_full_step(loaded, most_pages)  # several prompts make one, if none may be so long
            platform.release_unused()
        with _timed("kernels tried"):
            try_kernels(loaded, most_pages)
            if not compiles_in_parallel():
                try_graphs(loaded)
    platform.release_unused()


def _set_num_threads(config: EngineConfig, platform: Platform) -> None:
    """Set the number of torch's threads. By default, ranks that share the CPUs share its usual number."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif config.tensor_parallel_size > 1 and platform.serves_all_ranks:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))


def _max_num_drafts(config: EngineConfig, layout: CacheLayout, ops: OpTable) -> int:
    """Return the most drafts of a row in a step; 0 without speculative decoding.

    Raises ConfigError if the model's drafts cannot be verified.
    """
    if config.speculative_config is None:
        return 0
    remedy = "leave --speculative-config out"
    if not layout.verifies_drafts:
        raise ConfigError(f"--speculative-config: this model has states for which drafts cannot be verified; {remedy}")
    if not ops.redirects.issuperset(layout.state_operators):
        raise ConfigError(f"--speculative-config needs state operators that redirect (no --force-state-copy); {remedy}")
    return config.speculative_config.num_speculative_tokens


def _check_device(config: EngineConfig, num_rows: int, platform: Platform) -> None:
    """Raise ConfigError for options that the device's kernels do not support."""
    device, traits = platform.device, platform.traits(platform.device)
    if config.kv_cache_dtype == "fp8" and not traits.has_fp8:
        raise ConfigError(
            f"kv_cache_dtype='fp8' is not possible on {device}, which does not convert 8-bit floats (NVIDIA GPUs of "
            "compute capability 8.9 or more do); give 'auto'"
        )
    if _has_tiers_or_peers(config) and not (platform.shares_memory or platform.has_copy_streams):
        raise ConfigError(
            f"tiers and links to other engines (kv_offloading_size, kv_disk_path, kv_transfer_config) are not possible "
            f"on {device}, whose steps would wait for their copies; they need a CPU or a device that torch calls cuda; "
            "leave them out"
        )
    if traits.most_rows is not None and num_rows > traits.most_rows:
        raise ConfigError(
            f"max_num_seqs={num_rows} is not possible on {device}, whose launches have at most {traits.most_programs} "
            f"programs; give {traits.most_rows} or less"
        )


def _state_write_interval(config: EngineConfig, layout: CacheLayout, num_rows: int, platform: Platform) -> int:
    """Return after how many tokens states are written. Raises ConfigError for options that exclude each other."""
    asked, drafting = config.state_write_interval, config.speculative_config is not None
    if drafting and config.deterministic and asked not in (None, 1):
        raise ConfigError(
            f"state_write_interval={asked} is not possible with --speculative-config and --deterministic: drafts would "
            "change last bits; leave one of them out"
        )
    if not layout.spaces_writes:
        return 1
    if asked is not None:
        return asked
    if config.deterministic or num_rows < LEAST_RECORDED:
        return 1
    return platform.traits(platform.device).state_write_interval


def _load(config: EngineConfig, ops: OpTable, platform: Platform, ranks: Ranks, max_image_tokens: int) -> Model:
    remedy = "use a smaller model or a device with more memory, or end other programs that hold some of it"
    doing = f"loading the weights ({platform.free_bytes() / GIB:.1f} GiB were free)"
    progress = WeightsProgress(show_bar=config.shows_bars)
    with _timed("weights loaded"), explained_exhaustion(doing, remedy), progress:
        return load_model(
            config.model,
            ops=ops,
            dtype=config.dtype,
            load_format=config.load_format,
            seed=config.seed,
            state_dtype=config.mamba_ssm_cache_dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            max_model_len=config.max_model_len,
            hf_overrides=config.hf_overrides,
            quantization=config.quantization,
            device=platform.device,
            progress=progress,
            mtp=config.speculative_config is not None and config.speculative_config.method == "mtp",
            vision=config.read_image_settings(),
            ranks=ranks,
            fp8_as_bytes=not platform.traits(platform.device).has_fp8,
            on_host=platform.shares_memory,
            max_image_tokens=max_image_tokens,
        )


def _size_arena(config: EngineConfig, loaded: Loaded) -> int:
    """Return the number of pages: as the user says, or what the device's memory leaves next to weights and steps.

    Raises ConfigError if that is too little.
    """
    platform, given = loaded.platform, config.kv_cache_memory_bytes
    share = platform.arena_bytes(config.gpu_memory_utilization)
    if share is not None and given is None:
        with _timed("memory of steps measured"):
            beside = bytes_beside_arena(loaded)
        LOGGER.info("memory beside weights and arena: %.2f GiB for activations, logits and graphs", beside / GIB)
        # Read again: by now the driver holds the memory that kernels take when they first run.
        share = max(0, (platform.arena_bytes(config.gpu_memory_utilization) or 0) - beside)
    ring_bytes = 0
    if share is not None and _has_tiers_or_peers(config) and platform.has_copy_streams:
        if config.kv_transfer_config is not None and platform.lends_memory:
            ring_bytes = config.kv_transfer_config.ring_bytes // config.tensor_parallel_size
        share = max(0, share - STORED_AT_ONCE - BUFFERED_AT_ONCE - ring_bytes)
    limit = loaded.model.config.max_model_len
    return choose_num_pages(loaded.layout, limit, given, platform.free_bytes(), share, ring_bytes)


def _make_runner(loaded: Loaded, num_pages: int, num_host_pages: int) -> ModelRunner:
    size = f"{num_pages * loaded.layout.page_bytes / GIB:.1f} GiB"
    remedy = "lower kv_cache_memory_bytes or gpu_memory_utilization"
    with explained_exhaustion(f"allocating an arena of {size}", remedy):
        runner = ModelRunner(loaded, num_pages, num_host_pages=num_host_pages)
    if loaded.shapes:
        remedy = "lower gpu_memory_utilization, kv_cache_memory_bytes or max_num_seqs, or give enforce_eager"
        with (
            _timed(f"largest of {len(loaded.shapes)} graphs recorded"),
            explained_exhaustion("recording graphs", remedy),
        ):
            runner.record_largest()
    return runner


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    LOGGER.info("%s in %.1f s", what, time.perf_counter() - start)


def _log_model(config: EngineConfig, loaded: Loaded) -> None:
    model, ops, layout = loaded.model, loaded.ops, loaded.layout
    words = [f"{len(layout.kv)} attention and {len(layout.states)} recurrent layers", model.config.dtype]
    if model.config.quantization:
        words.append(f"weights {model.config.quantization.title}")
    if model.config.fp8_keys and layout.kv:
        words.append("keys and values FP8")
    if layout.states:
        words.append(f"states {config.mamba_ssm_cache_dtype}")
    if loaded.state_write_interval > 1:
        words.append(f"written every {loaded.state_write_interval} tokens")
    words.append(counted(torch.get_num_threads(), "CPU thread"))
    LOGGER.info("model: %s from %s, %s", model.config.architecture, config.model, ", ".join(words))
    copied = [name for name in layout.state_operators if name not in ops.redirects]
    LOGGER.info(operators_line(ops.backends))
    for line in operator_lines(ops.backends, copied):
        LOGGER.debug(line)

"""Builds a running engine from its options."""

from __future__ import annotations

from dataclasses import replace

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.tiers import TierSizes
from forkpoint.config import MIN_CHUNK, EngineConfig
from forkpoint.engine.chat import check_template
from forkpoint.engine.core import EngineCore
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.inputs import InputProcessor
from forkpoint.engine.request_log import RequestLog
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.models.registry import load_config
from forkpoint.obs.logs import LOGGER, cache_plan_lines, set_up_logging
from forkpoint.sched.scheduler import Scheduler
from forkpoint.sched.speculator import Speculator
from forkpoint.worker.build import build_worker
from forkpoint.worker.remote import start_ranks
from forkpoint.worker.worker import WorkerFacts


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer; None with `skip_tokenizer_init`. Sets up logging first.

    Unsupported models and templates fail here, before weights load. Raises ConfigError, ModelFolderError or
    UnsupportedModelError.
    """
    set_up_logging(config.log_level)
    # before the tokenizer, because its errors do not say that the folder holds another kind of model
    load_config(config.model, max_model_len=config.max_model_len, hf_overrides=config.hf_overrides)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.load(config.tokenizer or config.model)
    check_template(config, tokenizer)
    return tokenizer


def build_parts(config: EngineConfig, tokenizer: Tokenizer | None) -> tuple[EngineCore, InputProcessor]:
    """Start a worker, the engine loop that drives it, and the processor that creates its requests.

    Loads the weights, which takes long. Raises ConfigError, ModelFolderError, UnsupportedModelError, or
    EngineStoppedError if a worker's process dies.
    """
    log = RequestLog(config.log_requests, config.log_request_tokens) if config.log_requests else None
    LOGGER.info("loading %s", config.model)
    if config.speculative_config and config.speculative_config.ignored:
        LOGGER.info("speculative_config: %s changes nothing here", ", ".join(config.speculative_config.ignored))
    if config.kv_transfer_config is not None:  # once, for all ranks
        config = replace(config, kv_transfer_config=config.kv_transfer_config.of_this_start())
    is_apart = config.distributed_executor_backend == "mp" or config.tensor_parallel_size > 1
    worker = start_ranks([config] * config.tensor_parallel_size) if is_apart else build_worker(config)
    facts = worker.facts
    drafter: Speculator | None = None
    if config.speculative_config is not None:
        drafter = Speculator.of(config.speculative_config)
    images = ImageProcessor.load(config)
    scheduler = _make_scheduler(config, facts, drafter, has_images=images is not None)
    _log_plan(config, facts)
    events = None
    if config.kv_events_config.is_on:
        from forkpoint.engine.events import EventPublisher  # imports sockets and a codec

        events = EventPublisher(config.kv_events_config, scheduler.cache.watch_restorable())
    core = EngineCore(
        scheduler,
        worker.runner,
        async_scheduling=facts.scheduler.async_scheduling,
        drafts=drafter is not None,
        on_close=worker.release,
        check=worker.check,
        prepare=worker.prepare,
        events=events,
        log=log,
    )
    inputs = InputProcessor(
        tokenizer,
        facts.vocab_size,
        facts.max_model_len,
        frozenset(
            token for token in eos_token_ids(config.model, tokenizer, config.hf_overrides) if token < facts.vocab_size
        ),
        config.seed,
        structured_outputs=config.structured_outputs_config,
        images=images,
    )
    return core, inputs


def _make_scheduler(
    config: EngineConfig, facts: WorkerFacts, drafter: Speculator | None, *, has_images: bool
) -> Scheduler:
    """Return the scheduler of the worker's arena and tiers."""
    return Scheduler(
        facts.layout,
        facts.num_pages,
        config.cache,
        facts.scheduler,
        deterministic=config.deterministic,
        cost=RecomputeCost(facts.flops_per_token, facts.flops_per_pair),
        drafter=drafter,
        tiers=TierSizes(
            facts.num_host_pages,
            facts.disk,
            config.disk_write_limit_bytes // config.tensor_parallel_size,
            facts.peers,
            streams=facts.host_streams,
            weighs_disk=facts.host_streams,
        ),
        state_write_interval=facts.state_write_interval,
        has_images=has_images,
    )


def _log_plan(config: EngineConfig, facts: WorkerFacts) -> None:
    """Log what the arena holds, what is reused, and a warning if some allowed requests are too long for it."""
    layout, limit = facts.layout, facts.max_model_len
    num_disk_entries = None if facts.disk is None else len(facts.disk.entries)
    for line in cache_plan_lines(layout, facts.num_pages, config, limit, facts.num_host_pages, num_disk_entries):
        LOGGER.info(line)
    if config.deterministic:
        LOGGER.info("deterministic: cached and uncached runs agree bit for bit")
    budget, num_rows = facts.scheduler.max_num_batched_tokens, facts.scheduler.max_num_seqs
    if "max_num_seqs" not in config.scheduler and num_rows == budget - MIN_CHUNK + 1:
        LOGGER.warning(
            "max_num_batched_tokens=%d leaves room for max_num_seqs=%d: that many requests run at once, others wait",
            budget,
            num_rows,
        )
    longest = layout.longest_request(facts.num_pages)
    if layout.has_kv and longest < limit:
        LOGGER.warning(
            "the arena holds requests of at most %d tokens, but max_model_len is %d: longer ones are refused; raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or set max_model_len=%d",
            longest,
            limit,
            longest,
        )

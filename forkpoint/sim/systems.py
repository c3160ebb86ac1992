"""Systems by name: the engine with any of its policies, and the emulated peers, all in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from forkpoint.cache.capture import CAPTURE_POLICIES, Source, SourcedCapture, make_capture
from forkpoint.cache.eviction import EVICTION_POLICIES, RecomputeCost, make_policy
from forkpoint.config import CacheConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim.engine_system import EngineOptions, EngineSystem
from forkpoint.sim.foresight import ClairvoyantPolicy, Foresight
from forkpoint.sim.peers.scheduler import PeerScheduler
from forkpoint.sim.peers.sglang import SglangCache, SglangOptions
from forkpoint.sim.peers.vllm import VllmCache, VllmGeometry, VllmOptions
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.system import ServedSystem
from forkpoint.sim.trace import Trace

ENGINE: Final = "forkpoint"
CLAIRVOYANT: Final = f"{ENGINE}:eviction={ClairvoyantPolicy.name}"
VLLM: Final[Mapping[str, VllmOptions]] = MappingProxyType(
    {"vllm": VllmOptions(), "vllm-dense": VllmOptions(dense=True), "vllm-unit64": VllmOptions(unit=64)}
)
SGLANG: Final[Mapping[str, SglangOptions]] = MappingProxyType(
    {"sglang": SglangOptions(), "sglang-no-buffer": SglangOptions(extra_buffer=False)}
)
PEERS: Final = (*VLLM, *SGLANG)


def make_system(
    name: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None = None
) -> ServedSystem:
    """A system of `memory_bytes` for keys, values and states.

    Names: the peers', `forkpoint`, and `forkpoint` with policies, as in `forkpoint:capture=dense,eviction=lru`.
    `trace` has all requests that this system is going to get; `eviction=clairvoyant` needs it. Raises ConfigError.
    """
    if name in VLLM:
        geometry = VllmGeometry.of(shape)
        cache = VllmCache(geometry, memory_bytes // geometry.id_bytes, VLLM[name])
        return PeerScheduler(name, cache, shape.layout, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    if name in SGLANG:
        pools = SglangCache(shape, memory_bytes, SGLANG[name])
        return PeerScheduler(name, pools, shape.layout, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    head, _, policies = name.partition(":")
    if head != ENGINE:
        raise ConfigError(
            f"no system {name!r}; give {ENGINE}, {ENGINE}:capture=...,eviction=..., or {', '.join(PEERS)}"
        )
    if name == CLAIRVOYANT:
        return EngineSystem(name, _clairvoyant_options(shape, memory_bytes, scheduler, trace))
    return EngineSystem(name, engine_options(policies, shape, memory_bytes, scheduler))


def _clairvoyant_options(
    shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None
) -> EngineOptions:
    """The engine with foresight in place of its policies: states at the boundaries that foresight declares, no others,
    and tokens saved count, whatever they cost to compute."""
    if trace is None:
        raise ConfigError(f"{CLAIRVOYANT} has to know all requests of its only replica; give --replicas 1")
    if not shape.layout.has_states:
        raise ConfigError(f"{CLAIRVOYANT} foresees checkpoints, and {shape.name} has no states; leave it out")
    foresight = Foresight(trace)
    return replace(
        engine_options("capture=declared", shape, memory_bytes, scheduler),
        cost=RecomputeCost(),
        policy=ClairvoyantPolicy(foresight),
        capture=SourcedCapture({Source.DECLARED}),
        foresight=foresight,
    )


def engine_options(policies: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig) -> EngineOptions:
    """The engine's options with `capture=NAME` and `eviction=NAME` as `policies` says ('': the defaults)."""
    chosen = {}
    for policy in filter(None, policies.split(",")):
        kind, _, value = policy.partition("=")
        allowed = {"capture": CAPTURE_POLICIES, "eviction": EVICTION_POLICIES}.get(kind)
        if allowed is None or value not in allowed:
            known = f"capture={'|'.join(CAPTURE_POLICIES)} or eviction={'|'.join(EVICTION_POLICIES)}"
            raise ConfigError(f"no policy {policy!r} of {ENGINE}; give {known}, or {CLAIRVOYANT} alone")
        chosen[kind] = value
    config, layout = CacheConfig(), shape.layout
    num_pages = memory_bytes // layout.page_bytes
    if num_pages < 2:
        raise ConfigError(f"{memory_bytes} bytes hold no two pages of {layout.page_bytes}; give more memory")
    return EngineOptions(
        layout=layout,
        num_pages=num_pages,
        cache=config,
        scheduler=replace(scheduler, max_queue_len=1 << 30),
        cost=shape.recompute_cost,
        policy=make_policy(chosen.get("eviction", config.eviction_policy)),
        capture=make_capture(chosen.get("capture", config.capture_policy), config.checkpoint_interval),
    )

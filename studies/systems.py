"""The systems to compare, with the same memory: the engine, the engine with foresight, and emulations of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim import named_systems
from forkpoint.sim.replica import SimulatedReplica
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.trace import Trace
from studies.emulations.scheduler import EmulatedScheduler
from studies.emulations.sglang import SglangCache, SglangOptions
from studies.emulations.vllm import VllmCache, VllmGeometry, VllmOptions
from studies.foresight import ClairvoyantPolicy, DeclaredCapture, ForeseeingSystem, Foresight

ENGINE: Final = named_systems.ENGINE
CLAIRVOYANT: Final = f"{ENGINE}:eviction=clairvoyant"
VLLM: Final[Mapping[str, VllmOptions]] = MappingProxyType(
    {"vllm": VllmOptions(), "vllm-dense": VllmOptions(dense=True), "vllm-unit64": VllmOptions(unit=64)}
)
SGLANG: Final[Mapping[str, SglangOptions]] = MappingProxyType(
    {
        "sglang": SglangOptions(),
        "sglang-0.5": SglangOptions(memory_ratio=0.5),
        "sglang-0.3": SglangOptions(memory_ratio=0.3),
        "sglang-no-buffer": SglangOptions(extra_buffer=False),
    }
)
EMULATIONS: Final = (*VLLM, *SGLANG)


def make_system(
    name: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None = None
) -> SimulatedReplica:
    """Create a system with `memory_bytes` for keys, values and states.

    Its name is an emulation's, `forkpoint:eviction=clairvoyant`, which needs all its requests beforehand, or one that
    `forkpoint simulate` takes. Raises ConfigError.
    """
    rows, budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if name in VLLM:
        geometry = VllmGeometry.of(shape)
        cache = VllmCache(geometry, memory_bytes // geometry.id_bytes, VLLM[name])
        return EmulatedScheduler(name, cache, shape.layout, budget, rows)
    if name in SGLANG:
        return EmulatedScheduler(name, SglangCache(shape, memory_bytes, SGLANG[name]), shape.layout, budget, rows)
    if name == CLAIRVOYANT:
        return _clairvoyant(name, shape, memory_bytes, scheduler, trace)
    if name.partition(":")[0] == ENGINE:
        return named_systems.make_system(name, shape, memory_bytes, scheduler, trace)
    raise ConfigError(
        f"no system {name!r}; give {ENGINE}, {ENGINE}:capture=...,eviction=..., {CLAIRVOYANT}, or "
        f"{', '.join(EMULATIONS)}"
    )


def _clairvoyant(
    name: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None
) -> SimulatedReplica:
    """Create the engine with foresight instead of its policies.

    States are stored only at the boundaries that foresight declares. Saved tokens count, whatever they cost to compute.
    """
    if trace is None:
        raise ConfigError(f"{CLAIRVOYANT} has to know all requests of its only replica; give --replicas 1")
    if not shape.layout.has_states:
        raise ConfigError(f"{CLAIRVOYANT} foresees checkpoints, and {shape.name} has no states; leave it out")
    foresight = Foresight(trace)
    options = replace(
        named_systems.engine_options("", shape, memory_bytes, scheduler),
        cost=RecomputeCost(),
        new_policy=partial(ClairvoyantPolicy, foresight),
        capture=DeclaredCapture(),
    )
    return ForeseeingSystem(options, foresight)

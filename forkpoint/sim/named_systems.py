"""Simulated engines by name: `forkpoint` with any of its policies and with drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from forkpoint.cache.layout import WIDEST_STORED, CacheLayout
from forkpoint.cache.tier_entries import DiskFacts, no_entries
from forkpoint.cache.tiers import TierSizes
from forkpoint.config import GIB, MAX_HOST_GIB, CacheConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.sim.acceptance import SetAcceptance
from forkpoint.sim.engine_replica import EngineOptions, EngineReplica
from forkpoint.sim.replica import SimulatedReplica
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.trace import Trace

ENGINE: Final = "forkpoint"
TIERS: Final = MappingProxyType({"host_memory": "0", "disk_memory": "0", "disk_rate": "6"})
DRAFTS: Final = MappingProxyType({"acceptance_length": "1", "num_speculative_tokens": "0"})


def make_system(
    name: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig, trace: Trace | None = None
) -> SimulatedReplica:
    """Create a replica with `memory_bytes` for keys, values and states.

    The name is `forkpoint`, or `forkpoint` with options, as in `forkpoint:capture=dense,eviction=lru`. `trace` serves
    systems that know all requests beforehand. Raises ConfigError.
    """
    head, _, options = name.partition(":")
    if head != ENGINE:
        raise ConfigError(f"no system {name!r}; give {ENGINE} or {ENGINE}:OPTION=...,OPTION=...")
    return EngineReplica(engine_options(options, shape, memory_bytes, scheduler))


def engine_options(options: str, shape: ModelShape, memory_bytes: int, scheduler: SchedulerConfig) -> EngineOptions:
    """Read the options of a simulated engine, such as `capture=NAME,eviction=NAME` ('': the defaults).

    A name may also be `module:Class`. With `acceptance_length=2.4`, rows have `num_speculative_tokens=3` drafts.
    `host_memory=64` is the size of a host tier in GiB, `disk_memory=400` that of a disk tier, whose disk reads and
    writes `disk_rate=6` GB a second. Raises ConfigError.
    """
    config, layout = CacheConfig(), shape.layout
    chosen = {"capture": config.capture_policy, "eviction": config.eviction_policy, **TIERS, **DRAFTS}
    for option in filter(None, options.split(",")):
        kind, _, value = option.partition("=")
        if kind not in chosen:
            raise ConfigError(f"no option {option!r} of {ENGINE}; give {', '.join(f'{name}=...' for name in chosen)}")
        chosen[kind] = value
    if any(chosen[name] != TIERS[name] for name in ("host_memory", "disk_memory")):
        layout = CacheLayout.create(shape.layers, longest=WIDEST_STORED + 1)
    stored = layout.in_tiers()
    num_pages = memory_bytes // layout.page_bytes
    if num_pages < 2:
        raise ConfigError(f"{memory_bytes} bytes are less than two pages of {layout.page_bytes} bytes; give more")
    return EngineOptions(
        layout=layout,
        num_pages=num_pages,
        cache=replace(config, eviction_policy=chosen["eviction"], capture_policy=chosen["capture"]),
        scheduler=replace(scheduler, max_queue_len=1 << 30),
        cost=shape.recompute_cost,
        drafter=_drafter(*(chosen[name] for name in DRAFTS)),
        tiers=TierSizes(_num_pages("host_memory", chosen, stored.page_bytes), _disk(chosen, stored), weighs_disk=True),
        disk_rate=_disk_rate(chosen["disk_rate"]),
    )


def _num_pages(name: str, chosen: Mapping[str, str], page_bytes: int) -> int:
    """Return the pages of the tier `name`, whose size is given as text in GiB; 0: there is none.

    Raises ConfigError.
    """
    gib = chosen[name]
    try:
        size = float(gib)
    except ValueError:
        size = -1
    if not 0 <= size <= MAX_HOST_GIB:
        raise ConfigError(f"{name}={gib} is not allowed; give GiB from 0 to {MAX_HOST_GIB}, such as 64")
    num_bytes = math.ceil(size * GIB)
    if num_bytes and num_bytes < 2 * page_bytes:
        raise ConfigError(f"{name}={gib}: {num_bytes} bytes are less than two pages of {page_bytes} bytes; give more")
    return num_bytes // page_bytes


def _disk(chosen: Mapping[str, str], layout: CacheLayout) -> DiskFacts | None:
    num_pages = _num_pages("disk_memory", chosen, layout.page_bytes)
    if not num_pages:
        return None
    if not layout.has_kv:
        raise ConfigError("disk_memory is not possible for models without attention: leave it out")
    return DiskFacts(num_pages, no_entries())


def _disk_rate(given: str) -> float:
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e6:
        raise ConfigError(f"disk_rate={given} is not allowed; give GB a second, such as 6")
    return rate * 1e9


def _drafter(length: str, num_drafts: str) -> SetAcceptance | None:
    try:
        given = float(length), int(num_drafts)
    except ValueError:
        raise ConfigError(f"acceptance_length={length},num_speculative_tokens={num_drafts} are not numbers") from None
    return None if given == (1, 0) else SetAcceptance(*given)

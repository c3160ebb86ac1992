"""The worker as its engine sees it, in whatever process it runs. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.tier_entries import DiskFacts
from forkpoint.config import SchedulerConfig
from forkpoint.sched.plan import Runner


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts of a worker, which hold from its start on."""

    layout: CacheLayout
    num_pages: int  # of the arena, including page 0
    vocab_size: int
    max_model_len: int
    scheduler: SchedulerConfig  # the user's options, and the device's defaults for the others
    flops_per_token: int
    flops_per_pair: int  # for one query that attends to one key
    num_host_pages: int  # of the host tier, including its page 0; 0: there is no such tier
    disk: DiskFacts | None  # the disk tier
    peers: PeerFacts | None  # the link to other engines
    host_streams: bool  # copies of the host tier run next to the steps
    state_write_interval: int  # tokens between two writes of the states that allow it


@dataclass(frozen=True, slots=True)
class Worker:
    """A runner with its facts.

    Call `release` to free memory once the runner was closed and dropped. `check` raises EngineStoppedError if a process
    of the worker has ended. `prepare` does for up to a tenth of a second what later steps would have to wait for, and
    returns False if nothing is left to do. Call it while no step is in flight.
    """

    facts: WorkerFacts
    runner: Runner
    release: Callable[[], None]
    check: Callable[[], None] = lambda: None
    prepare: Callable[[], bool] = lambda: False

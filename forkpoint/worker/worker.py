"""What an engine has of the worker that runs its model, wherever that is. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.sched.plan import Runner


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Known once the model is loaded and the arena is cut; nothing of it changes."""

    layout: CacheLayout
    num_pages: int  # of the arena, page 0 included
    vocab_size: int
    max_model_len: int
    scheduler: SchedulerConfig  # what the user said, and else the device's defaults
    flops_per_token: int
    flops_per_pair: int  # of query and key


@dataclass(frozen=True, slots=True)
class Worker:
    """`release` gives memory back once the runner was closed and let go; `check` raises EngineStoppedError where a
    process of it is gone."""

    facts: WorkerFacts
    runner: Runner
    release: Callable[[], None]
    check: Callable[[], None] = lambda: None

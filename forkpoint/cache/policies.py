"""Policies by name: built in, from another package's entry point, or as `module:Class`."""

from __future__ import annotations

from typing import Final

from forkpoint.cache.capture import CapturePolicy, DefaultCapture, DenseCapture, PromptEndCapture
from forkpoint.cache.eviction import EvictionPolicy, LRUPolicy
from forkpoint.cache.learnt import LearntPolicy
from forkpoint.plugins import Registry

EVICTION: Final = Registry[type[EvictionPolicy]](
    "eviction policy", "forkpoint.eviction_policies", {"cost": LearntPolicy, "lru": LRUPolicy}, base=EvictionPolicy
)
CAPTURE: Final = Registry[type[CapturePolicy]](
    "capture policy",
    "forkpoint.capture_policies",
    {"default": DefaultCapture, "dense": DenseCapture, "prompt-end": PromptEndCapture},
    base=CapturePolicy,
)


def register_eviction_policy(name: str, policy: type[EvictionPolicy]) -> None:
    """Register an eviction policy in this process. Raises ConfigError if the name is taken."""
    EVICTION.add(name, policy)


def register_capture_policy(name: str, policy: type[CapturePolicy]) -> None:
    """Register a capture policy in this process. Raises ConfigError if the name is taken."""
    CAPTURE.add(name, policy)

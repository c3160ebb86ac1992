"""Policies by name: built in, from another package's entry point, or as `module:Class`."""

from __future__ import annotations

from typing import Final, TypeVar

from forkpoint.cache.capture import CapturePolicy, DefaultCapture, DenseCapture, PromptEndCapture
from forkpoint.cache.eviction import EvictionPolicy, LRUPolicy
from forkpoint.cache.learnt import LearntPolicy
from forkpoint.errors import ConfigError
from forkpoint.plugins import Registry

Policy = TypeVar("Policy")

EVICTION: Final = Registry[type[EvictionPolicy]](
    "eviction policy", "forkpoint.eviction_policies", {"cost": LearntPolicy, "lru": LRUPolicy}, base=EvictionPolicy
)
CAPTURE: Final = Registry[type[CapturePolicy]](
    "capture policy",
    "forkpoint.capture_policies",
    {"default": DefaultCapture, "dense": DenseCapture, "prompt-end": PromptEndCapture},
    base=CapturePolicy,
)


def new_eviction_policy(name: str) -> EvictionPolicy:
    """Return a new eviction policy of that name. Raises ConfigError if there is none, or it cannot be created."""
    return _new(EVICTION.find(name), f"the eviction policy {name!r}", "key", EvictionPolicy.key)


def new_capture_policy(name: str) -> CapturePolicy:
    """Return a new capture policy of that name. Raises ConfigError if there is none, or it cannot be created."""
    return _new(CAPTURE.find(name), f"the capture policy {name!r}", "positions", CapturePolicy.positions)


def _new(policy: type[Policy], what: str, method: str, unwritten: object) -> Policy:
    if getattr(policy, method) is unwritten:
        raise ConfigError(f"{what} has no method {method}(); write it as docs/extending.md says")
    try:
        return policy()
    except TypeError as error:
        raise ConfigError(f"{what} cannot be created without arguments: {error}; give them defaults") from error


def register_eviction_policy(name: str, policy: type[EvictionPolicy]) -> None:
    """Register an eviction policy in this process. Raises ConfigError if the name is taken."""
    EVICTION.add(name, policy)


def register_capture_policy(name: str, policy: type[CapturePolicy]) -> None:
    """Register a capture policy in this process. Raises ConfigError if the name is taken."""
    CAPTURE.add(name, policy)

"""Options of a fleet of replicas, besides those of each replica's server and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forkpoint.checks import MAX_INTEGER, Bounds, Checker, checked_fields, option
from forkpoint.config import mapping_option
from forkpoint.errors import ConfigError
from forkpoint.json_options import json_object

MAX_REPLICAS = 4096
MAX_ONGOING = 1 << 20
PREFILL_MIN_TOKENS = 2048  # computing a longer prompt takes longer than the way over another engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Options of a fleet. Names are Ray Serve's if it has the option. Raises ConfigError, naming the wrong option."""

    num_replicas: int = option(1, "number of engines, each with its own cache", Bounds(1, MAX_REPLICAS))
    num_prefill_replicas: int = option(
        0,
        "number of further engines that only compute long prompts, which the others then fetch and continue",
        Bounds(0, MAX_REPLICAS),
    )
    prefill_min_tokens: int = option(
        PREFILL_MIN_TOKENS,
        "tokens from which on a prompt is computed by a prefill replica; shorter ones go to the others at once",
        Bounds(1, MAX_INTEGER),
    )
    router: Literal["prefix-aware", "least-loaded", "round-robin"] = option(
        "prefix-aware",
        "where a request goes: to the replica that can restore most of its prompt, minus the cost of waiting there; to "
        "the one with the fewest requests; or to each in turn",
    )
    autoscaling_config: Mapping[str, Any] = mapping_option(
        ', instead of --num-replicas: Ray Serve\'s, such as {"min_replicas": 1, "max_replicas": 4}'
    )
    ray_actor_options: Mapping[str, Any] = mapping_option(
        ': resources of a replica, such as {"num_gpus": 1}; default: a GPU, or a CPU core if the cluster has no GPU'
    )
    max_ongoing_requests: int = option(
        256, "most requests that a replica has at once; others wait", Bounds(1, MAX_ONGOING)
    )
    ray_address: str | None = option(
        None,
        "address of a running cluster, or 'auto'; default: start one on this machine, until Ctrl-C",
        metavar="ADDRESS",
    )

    def __post_init__(self) -> None:
        checked_fields(self, Checker(ConfigError))
        for name in ("autoscaling_config", "ray_actor_options"):
            object.__setattr__(self, name, json_object(name, getattr(self, name)))
        if self.autoscaling_config and self.num_replicas != 1:
            raise ConfigError(
                f"num_replicas={self.num_replicas} and autoscaling_config both set the number of replicas; give one"
            )

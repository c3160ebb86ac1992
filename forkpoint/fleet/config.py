"""Options of several replicas beside those of each one's server and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forkpoint.checks import Bounds, Checker, checked_fields, option
from forkpoint.config import json_object, mapping_option
from forkpoint.errors import ConfigError

MAX_REPLICAS = 4096
MAX_ONGOING = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Names are Ray Serve's where it has them. Raises ConfigError naming what is wrong."""

    num_replicas: int = option(1, "engines, each with a cache of its own", Bounds(1, MAX_REPLICAS))
    router: Literal["prefix-aware", "least-loaded", "round-robin"] = option(
        "prefix-aware",
        "where a request goes: to the replica that can restore most of its prompt, less what waiting there costs; to "
        "the one with the fewest requests; or to each in turn",
    )
    autoscaling_config: Mapping[str, Any] = mapping_option(
        ', in the place of --num-replicas: Ray Serve\'s, as {"min_replicas": 1, "max_replicas": 4}'
    )
    ray_actor_options: Mapping[str, Any] = mapping_option(
        ': what a replica takes of the cluster, such as {"num_gpus": 1}; default: a GPU, or a core where the cluster '
        "has none",
    )
    max_ongoing_requests: int = option(
        256, "requests that are sent to a replica at once; others wait for one", Bounds(1, MAX_ONGOING)
    )
    ray_address: str | None = option(
        None, "of a running cluster, or 'auto'; default: a cluster on this machine, until Ctrl-C", metavar="ADDRESS"
    )

    def __post_init__(self) -> None:
        checked_fields(self, Checker(ConfigError))
        for name in ("autoscaling_config", "ray_actor_options"):
            object.__setattr__(self, name, json_object(name, getattr(self, name)))
        if self.autoscaling_config and self.num_replicas != 1:
            raise ConfigError(
                f"num_replicas={self.num_replicas} and autoscaling_config both say how many there are; give one"
            )

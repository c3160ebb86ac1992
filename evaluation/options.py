"""The options of `python -m evaluation`."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.checks import option
from forkpoint.errors import ConfigError

MODES = ("cold", "warm", "forked", "preempted", "pressure", "ngram", "mtp", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The questions and the modes. Raises ConfigError for values out of range."""

    num_examples: int = option(30, "held-out examples; each is asked at two earlier turns too")
    modes: tuple[str, ...] = option((), f"some of {', '.join(MODES)}; default: all. The cold cache is always asked")
    mutations: bool = option(False, "put faults into the cache instead, and show that the answers get worse")
    json: str | None = option(None, "write the results to this file too", metavar="FILE")

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ConfigError(f"num_examples={self.num_examples} is not allowed; give an integer of 1 or more")

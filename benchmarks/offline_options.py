"""The options of `benchmarks.latency` and `benchmarks.throughput`. Names and defaults are those of vLLM's commands."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.checks import option
from forkpoint.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """One batch, repeated. Raises ConfigError for values out of range."""

    input_len: int = option(32, "tokens of each prompt")
    output_len: int = option(128, "tokens of each answer")
    batch_size: int = option(8, "prompts asked at once")
    n: int = option(1, "completions per prompt")
    num_iters_warmup: int = option(10, "batches before the measurement")
    num_iters: int = option(30, "batches measured")
    profile: bool = option(False, "run one batch and print where its time goes instead")
    output_json: str | None = option(None, "file for the result")
    disable_detokenize: bool = option(False, "leave answers as token ids")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_iters_warmup", self.num_iters_warmup, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """All prompts of a dataset at once. Raises ConfigError for values out of range."""

    num_prompts: int = option(1000, "prompts to ask")
    input_len: int | None = option(None, "random prompts: their length; the same as --random-input-len")
    output_len: int | None = option(None, "answer length, whatever the dataset")
    prefix_len: int | None = option(None, "random prompts: tokens that all begin with; as --random-prefix-len")
    n: int = option(1, "completions per prompt")
    output_json: str | None = option(None, "file for the result")
    disable_detokenize: bool = option(False, "leave answers as token ids")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "n", "input_len", "output_len"):
            _at_least(name, getattr(self, name), 1)
        _at_least("prefix_len", self.prefix_len, 0)


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name}={value} is not allowed; give an integer of {low} or more")

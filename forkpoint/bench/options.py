"""The options of `bench serve`. Names and defaults are those of `vllm bench serve` if it has the option."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from forkpoint.checks import Checker, host_in_url, is_ipv6, option
from forkpoint.client.server import CHAT, COMPLETIONS, base_url
from forkpoint.errors import ConfigError
from forkpoint.json_options import json_object

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
PATHS: Final[Mapping[str, str]] = MappingProxyType({"openai": COMPLETIONS, "openai-chat": CHAT})

_CHECK: Final = Checker(ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The server to measure, and the form of requests. Raises ConfigError for values that are not allowed."""

    backend: Literal["openai", "openai-chat"] = option(
        "openai", "plain completions of token ids (openai) or chats (openai-chat)"
    )
    base_url: str | None = option(None, "the server; overrides --host and --port")
    host: str = option("127.0.0.1", "the server's host")
    port: int = option(8000, "the server's port")
    endpoint: str | None = option(None, "path to post to; default: the backend's own")
    api_key: str | None = option(None, "default: the environment's FORKPOINT_API_KEY")
    header: tuple[str, ...] = option((), "KEY=VALUE pairs sent with every request")
    model: str | None = option(None, "name of the model; default: the first one that the server lists", metavar="TEXT")
    tokenizer: str | None = option(
        None, "folder or hub id with the tokenizer; default: what the server names as the model's root"
    )
    ready_check_timeout_sec: float = option(0.0, "most seconds to wait for the server to become healthy")

    def __post_init__(self) -> None:
        _CHECK.integer("port", self.port, 1, 65535)
        ok = re.fullmatch(r"[^\s/?#@\\]+", self.host) and (":" not in self.host or is_ipv6(self._bare_host))
        _CHECK.require(bool(ok), "host", self.host, "a name or an address")
        timeout = self.ready_check_timeout_sec
        _CHECK.require(timeout >= 0, "ready_check_timeout_sec", timeout, "0 or more")
        _CHECK.require(self.path.startswith("/"), "endpoint", self.endpoint, "a path that begins with /")
        base_url(self.url)
        _pairs("header", self.header)

    @property
    def _bare_host(self) -> str:
        return re.sub(r"^\[(.*)\]$", r"\1", self.host)

    @property
    def url(self) -> str:
        return self.base_url or f"http://{host_in_url(self._bare_host)}:{self.port}"

    @property
    def path(self) -> str:
        return self.endpoint or PATHS[self.backend]

    @property
    def headers(self) -> dict[str, str]:
        return _pairs("header", self.header)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The number, rate and sampling of requests. Raises ConfigError for values out of range."""

    num_prompts: int = option(1000, "requests to send, including those of all turns and branches")
    request_rate: float = option(math.inf, "requests a second; inf sends all at once")
    burstiness: float = option(1.0, "1: Poisson arrivals; below: bursts; above: more even")
    max_concurrency: int | None = option(None, "most requests in flight")
    num_warmups: int = option(0, "requests sent before the measurement, with prompts of their own")
    seed: int = option(0, "seed of the prompts and the arrivals")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token, so that all answers have the full length")
    temperature: float = option(0.0, "0 takes the most likely token")
    top_p: float | None = option(None, "as in a request")
    top_k: int | None = option(None, "as in a request")
    min_p: float | None = option(None, "as in a request")
    extra_body: str | None = option(None, "JSON object with further fields for every request")
    disable_tqdm: bool = option(False, "no progress bar")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "request_rate", "burstiness", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0")
        if math.isinf(self.burstiness):
            raise ConfigError("burstiness=inf must be a finite number")
        for name in ("num_warmups", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        self.sampling_body()

    def sampling_body(self) -> dict[str, Any]:
        """Return the body fields that these options set. Raises ConfigError if `extra_body` is not a JSON object."""
        names = ("temperature", "top_p", "top_k", "min_p")
        body = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **json_object("extra_body", self.extra_body or "{}")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The output of a run. Raises ConfigError for unknown metrics and bad numbers."""

    percentile_metrics: str = option(
        "ttft,tpot,itl", "metrics to report, out of ttft, tpot, itl and e2el, separated by commas"
    )
    metric_percentiles: str = option("99", "percentiles to report, separated by commas")
    goodput: tuple[str, ...] = option((), "KEY:MS pairs of ttft, tpot, e2el that a good request must meet")
    save_result: bool = option(False, "write the result as JSON")
    save_detailed: bool = option(False, "include each request's figures and text in the result")
    append_result: bool = option(False, "append to the file, one line for each run")
    result_dir: str | None = option(None, "folder of the result; default: the working directory")
    result_filename: str | None = option(None, "default: composed of backend, rate, model and time")
    label: str | None = option(None, "replaces the backend in the file's name")
    metadata: tuple[str, ...] = option((), "KEY=VALUE pairs to keep in the result")

    def __post_init__(self) -> None:
        unknown = set(self.metrics) - set(METRICS)
        if unknown:
            raise ConfigError(
                f"percentile_metrics names {', '.join(sorted(unknown))}; give some of {', '.join(METRICS)}"
            )
        if not all(0 <= value <= 100 for value in self.percentiles):
            raise ConfigError(f"metric_percentiles={self.metric_percentiles!r} must be numbers from 0 to 100")
        unknown = set(self.limits_ms) - set(GOODPUT_METRICS)
        if unknown:
            raise ConfigError(f"goodput names {', '.join(sorted(unknown))}; give some of {', '.join(GOODPUT_METRICS)}")
        _pairs("metadata", self.metadata)

    @property
    def notes(self) -> dict[str, str]:
        """The metadata, by name."""
        return _pairs("metadata", self.metadata)

    @property
    def folder(self) -> Path | None:
        """The folder to write the result to; None if it is not to be written."""
        return Path(self.result_dir or ".") if self.save_result or self.append_result else None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        return tuple(_number("metric_percentiles", text) for text in self.metric_percentiles.split(",") if text.strip())

    @property
    def limits_ms(self) -> dict[str, float]:
        """The longest allowed time of each metric that `goodput` names."""
        pairs = (text.partition(":") for text in self.goodput)
        return {name: _number("goodput", value) for name, _, value in pairs}


def _pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{name}={text!r} must be KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not a number") from error


NEEDS_FILE = ("sharegpt", "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """The prompts to send. Lengths are in tokens. Raises ConfigError for values out of range and a missing file."""

    dataset_name: Literal["random", "random-mm", "sharegpt", "prefix_repetition", "multi_turn", "fork", "trace"] = (
        option(
            "random",
            "random: unrelated prompts; random-mm: with images; prefix_repetition: prompts after a few shared "
            "prefixes; multi_turn: conversations; fork: branches of conversations; sharegpt, trace: from a file",
        )
    )
    dataset_path: str | None = option(
        None,
        "ShareGPT JSON; or a trace: Mooncake .jsonl, Azure .csv, Claude-Code .json, folder or .tar.xz, a request log",
    )
    random_input_len: int = option(1024, "prompt length")
    random_output_len: int = option(128, "answer length")
    random_range_ratio: float = option(0.0, "lengths vary by this share up and down")
    random_prefix_len: int = option(0, "additional tokens that all prompts begin with")
    random_mm_base_items_per_request: int = option(1, "images of a request; needs --backend openai-chat")
    random_mm_num_mm_items_range_ratio: float = option(0.0, "the number of images varies by this share up and down")
    random_mm_limit_mm_per_prompt: str = option('{"image": 255, "video": 1}', "JSON: the most images of a request")
    random_mm_bucket_config: str = option(
        "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}",
        "probabilities of (height, width, frames) of images; frames are 1",
    )
    sharegpt_output_len: int | None = option(None, "answer length; default: that of the recorded answer")
    prefix_repetition_prefix_len: int = option(256, "length of a shared prefix")
    prefix_repetition_suffix_len: int = option(256, "length of the rest of the prompt")
    prefix_repetition_num_prefixes: int = option(10, "number of prefixes")
    prefix_repetition_output_len: int = option(128, "answer length")
    multi_turn_num_turns: int = option(5, "turns of a conversation")
    multi_turn_prefix_len: int = option(0, "tokens that all conversations begin with")
    multi_turn_first_len: int = option(1024, "length of a conversation's first message")
    multi_turn_input_len: int = option(128, "length of each further message")
    multi_turn_output_len: int = option(128, "answer length")
    multi_turn_think_time: float = option(0.0, "seconds between an answer and the next message")
    fork_context_len: int = option(2048, "length of the message whose answer the branches follow")
    fork_num_branches: int = option(4, "branches of each context, all started after its answer")
    fork_num_turns: int = option(1, "turns in each branch")
    fork_branch_len: int = option(128, "length of each message in a branch")
    fork_output_len: int = option(128, "answer length")
    trace_speed: float = option(1.0, "factor by which the trace is replayed faster")
    trace_shrink: int = option(1, "keep one of that many tokens: prompts get shorter, but share the same parts")
    trace_num_sessions: int | None = option(
        None, "take that many sessions, turn by turn; default: requests in the order of the file"
    )

    def __post_init__(self) -> None:
        may_be_zero = {"random_prefix_len", "multi_turn_prefix_len", "multi_turn_think_time", "random_range_ratio"}
        may_be_zero |= {"random_mm_base_items_per_request", "random_mm_num_mm_items_range_ratio"}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and (value < 0 or (value == 0 and each.name not in may_be_zero)):
                raise ConfigError(f"{each.name}={value} is too small; give more than 0, or 0 where that means none")
        if self.random_range_ratio >= 1:
            raise ConfigError(f"random_range_ratio={self.random_range_ratio} must be below 1")
        if self.random_mm_num_mm_items_range_ratio > 1:
            raise ConfigError(
                f"random_mm_num_mm_items_range_ratio={self.random_mm_num_mm_items_range_ratio} must be at most 1"
            )
        if self.dataset_name in NEEDS_FILE and self.dataset_path is None:
            raise ConfigError(f"dataset_name={self.dataset_name} needs a file; give dataset_path")

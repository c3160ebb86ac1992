"""Engine options that are given together, as an object or as JSON. Their names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal, Self

from forkpoint.checks import MAX_POSITIONS, Bounds, Checker, checked_fields, option
from forkpoint.errors import ConfigError

MAX_EVENTS: Final = 2**30 - 1
MAX_DRAFTS: Final = 63  # drafts per row and step, so that a row crosses at most one block boundary
DEFAULT_LOOKUP: Final = 5
LEAST_MATCH: Final = 3  # tokens of a past output that must match before it is searched
MAX_LOOKUP: Final = 64
# vLLM's older names of 'mtp'
MTP_NAMES: Final = (
    *("qwen3_next_mtp", "qwen3_5_mtp", "qwen4_exp_mtp", "nemotron_h_mtp"),
    *("bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "glm5_next_mtp", "alice_ai_mtp"),
)
# Fields of vLLM's speculative_config that choose kernels or are those of the model itself.
WITHOUT_EFFECT: Final = (
    "attention_backend",
    "disable_padded_drafter_batch",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "moe_backend",
)
SUFFIX_ALONE: Final = "is a field of the method 'suffix' alone; leave it out"
EXAMPLE_OF_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'

_CHECK: Final = Checker(ConfigError)


def bounded(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number in `[low, high]` that has no command-line flag of its own."""
    return option(default, bounds=Bounds(low, high))


def json_object(name: str, given: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
    """Read a mapping or its JSON text. Raises ConfigError for anything else, and for keys that are not `known`."""
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={given!r} is not JSON: {error}") from error
    if not isinstance(found, Mapping) or (known is not None and not set(found) <= set(known)):
        keys = f" with {' or '.join(known)}" if known is not None else ""
        raise ConfigError(f"{name}={given!r} is not allowed; give a JSON object{keys}")
    return dict(found)


class JsonConfig:
    """Options that are given together, as an object, a mapping or JSON text, under the name `option_name`.

    Raises ConfigError for values of wrong types or out of range.
    """

    __slots__ = ()
    option_name: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in checked_fields(self, Checker(ConfigError, f"{self.option_name}: ")).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Read any of the three forms. Raises ConfigError for other forms, unknown names and wrong values."""
        return given if isinstance(given, cls) else cls.read(json_object(cls.option_name, given))

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        known = [item.name for item in fields(cls) if not item.metadata.get("derived")]  # type: ignore[arg-type]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{cls.option_name}: {unknown[0]!r} is not supported here; fields are {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig(JsonConfig):
    """Options of all structured outputs. Names are vLLM's; llguidance enforces the grammars."""

    option_name = "structured_outputs_config"
    backend: Literal["auto", "guidance", "xgrammar"] = "auto"
    disable_any_whitespace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(JsonConfig):
    """Options for publishing which blocks can be restored. Names and defaults are vLLM's, except for `host`."""

    option_name = "kv_events_config"
    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq, where events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    host: str | None = None  # `*` in an endpoint stands for it; None: the server's --host, or this machine alone
    buffer_steps: int = bounded(1, MAX_EVENTS, 10_000)  # batches kept for replays
    hwm: int = bounded(1, MAX_EVENTS, 100_000)  # of the socket, in batches
    max_queue_size: int = bounded(1, MAX_EVENTS, 100_000)  # batches
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(JsonConfig):
    """How tokens are drafted. Names and defaults are vLLM's; the method `cache` is forkpoint's own."""

    option_name = "speculative_config"
    method: Literal["mtp", "ngram", "suffix", "cache"]
    num_speculative_tokens: int = bounded(1, MAX_DRAFTS)
    prompt_lookup_min: int | None = bounded(1, MAX_LOOKUP, None)
    prompt_lookup_max: int | None = bounded(1, MAX_LOOKUP, None)
    suffix_decoding_max_tree_depth: int = bounded(LEAST_MATCH + 1, MAX_LOOKUP, 24)
    suffix_decoding_max_cached_requests: int = bounded(0, MAX_POSITIONS, 10_000)
    suffix_decoding_max_spec_factor: float = bounded(0, MAX_LOOKUP, 1.0)
    suffix_decoding_min_token_prob: float = bounded(0, 1, 0.1)
    ignored: tuple[str, ...] = field(default=(), metadata={"derived": True})  # given fields that change nothing here

    def __post_init__(self) -> None:
        super(SpeculativeConfig, self).__post_init__()  # dataclass slots replace the class, so a bare super() fails
        name, least, most = self.option_name, *self.lookup_range
        _CHECK.integer(f"{name}: prompt_lookup_max", most, least, MAX_LOOKUP)
        for item in fields(self) if self.method != "suffix" else ():
            if item.name.startswith("suffix_") and getattr(self, item.name) != item.default:
                raise ConfigError(f"{name}: {item.name!r} {SUFFIX_ALONE}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Read the options, also under vLLM's older names; fields without an effect are `ignored`.

        Without a number of tokens, `suffix` drafts as many as its depth allows. Raises ConfigError.
        """
        if given.get("method") in MTP_NAMES:
            given = {**given, "method": "mtp"}
        ignored = tuple(name for name in WITHOUT_EFFECT if name in given)
        given = {name: value for name, value in given.items() if name not in ignored}
        as_many_as_fit = given.get("method") == "suffix" and given.get("num_speculative_tokens") is None
        found = dict(given)
        if as_many_as_fit:
            found["num_speculative_tokens"] = MAX_DRAFTS
        for key in ("method", "num_speculative_tokens"):
            if found.get(key) is None:
                raise ConfigError(f"{cls.option_name}={given!r} needs {key!r}, as in {EXAMPLE_OF_SPECULATION}")
        config = replace(super(SpeculativeConfig, cls).read(found), ignored=ignored)
        if config.method != "suffix" and (wrong := [name for name in given if name.startswith("suffix_")]):
            raise ConfigError(f"{cls.option_name}: {wrong[0]!r} {SUFFIX_ALONE}")
        if as_many_as_fit:
            config = replace(config, num_speculative_tokens=config.suffix_decoding_max_tree_depth - LEAST_MATCH)
        return config

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The fewest and the most tokens that must match.

        As in vLLM, one option stands for both. Without either, both are 5, or the range of past outputs for `suffix`.
        """
        given = [length for length in (self.prompt_lookup_min, self.prompt_lookup_max) if length is not None]
        if given:
            return given[0], given[-1]
        if self.method == "suffix":
            return LEAST_MATCH, self.suffix_decoding_max_tree_depth - 1
        return DEFAULT_LOOKUP, DEFAULT_LOOKUP

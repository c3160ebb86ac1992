"""Engine options. Field names are vLLM's flags with underscores; help texts serve the command line too."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forkpoint.checks import Checker
from forkpoint.errors import ConfigError

BLOCK_SIZE: Final = 64  # tokens of a block of keys and values, and the grid on which states are cut
MIN_CHUNK: Final = BLOCK_SIZE  # tokens of a prefill chunk that a full decode batch leaves room for
CHECKPOINT_INTERVAL = 512
GENERATION_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
MAX_OPTION_CHARS: Final = 2**20  # a chat template may be given as its text
MAX_INTEGER: Final = 2**63 - 1
MAX_POSITIONS: Final = 2**31 - 1  # positions are int32 on the device
MAX_ROWS: Final = 2**16
MAX_THREADS: Final = 1024
MAX_RANKS: Final = 64
MAX_DRAFTS: Final = 63  # of a row in a step, whose tokens pass one block boundary at most
DEFAULT_LOOKUP: Final = 5
LEAST_MATCH: Final = 3  # tokens of a past output that have to agree before it is looked at
MAX_LOOKUP: Final = 64
EXAMPLE_OF_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'

_CHECK: Final = Checker(ConfigError)
Options = TypeVar("Options")


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its command-line help."""
    return field(default=default, metadata={"help": help, **extra})


def mapping_option(help: str, default: Callable[[], Any] = dict) -> Any:
    """The same of a mapping that is given as JSON; by default it is empty, or what `default` makes."""
    return field(default_factory=default, metadata={"help": f"JSON{help}", "metavar": "JSON"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What is kept and what is evicted."""

    enable_prefix_caching: bool = option(True, "reuse keys, values and states of earlier prompts")
    mamba_cache_mode: Literal["align", "none"] = option(
        "align", "'none' keeps no state checkpoints, so hybrid models never hit ('align' is vLLM's name for on)"
    )
    eviction_policy: str = option(
        "cost", "what is evicted when the arena is full: cost, lru, a package's own, or module:Class"
    )
    capture_policy: str = option(
        "default", "which states become checkpoints: default, dense, prompt-end, a package's own, or module:Class"
    )
    checkpoint_interval: int = option(
        CHECKPOINT_INTERVAL,
        "tokens between periodic checkpoints, which take free room only; 64 where a state is as small as a few "
        "tokens' keys; 0 switches them off",
    )
    num_ghosts: int = option(65536, "evicted entries remembered for miss reasons and junction detection")

    @property
    def checkpoints(self) -> bool:
        return self.enable_prefix_caching and self.mamba_cache_mode == "align"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs at once."""

    max_num_batched_tokens: int = option(
        2048, "token budget of one step; a multiple of 64 wastes nothing; default: 2048 on a CPU, 8192 on a GPU"
    )
    max_num_seqs: int = option(64, "requests that run at once; default: 64 on a CPU, 256 on a GPU")
    max_queue_len: int = option(4096, "waiting requests beyond which new ones are refused")
    async_scheduling: bool = option(False, "plan step n+1 before the result of step n is known; default: on a GPU only")

    def with_options(self, said: Mapping[str, Any]) -> SchedulerConfig:
        """A device's defaults with `said` in their place; what was not said is kept compatible with what was."""
        found = replace(self, **said)
        if "max_num_batched_tokens" not in said:
            least = -(-(found.max_num_seqs + MIN_CHUNK) // BLOCK_SIZE) * BLOCK_SIZE
            return replace(found, max_num_batched_tokens=max(found.max_num_batched_tokens, least))
        if "max_num_seqs" not in said:
            return replace(found, max_num_seqs=min(found.max_num_seqs, found.max_num_batched_tokens - MIN_CHUNK + 1))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """What holds for the structured outputs of all requests. Names are vLLM's; llguidance enforces all of them."""

    backend: Literal["auto", "guidance", "xgrammar"] = "auto"
    disable_any_whitespace: bool = False

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsConfig:
        """From a mapping or its JSON text. Raises ConfigError for anything else and for unknown names."""
        if isinstance(given, cls):
            return given
        found = json_object("structured_outputs_config", given, [item.name for item in fields(cls)])
        return checked_types(cls(**found))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where to publish which blocks can be restored. Names and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq, where events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replays
    hwm: int = 100_000  # of the socket, in batches
    max_queue_size: int = 100_000  # batches
    topic: str = ""

    @classmethod
    def of(cls, given: Any) -> KVEventsConfig:
        """From a mapping or its JSON text. Raises ConfigError for anything else and for unknown names."""
        if isinstance(given, cls):
            return given
        config = checked_types(cls(**json_object("kv_events_config", given, [item.name for item in fields(cls)])))
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            _CHECK.integer(f"kv_events_config: {name}", getattr(config, name), 1, MAX_POSITIONS // 2 - 1)
        return config

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


# What vLLM takes besides: of drafters that are models, of its rejection sampling, of how its kernels run.
VLLM_SPECULATIVE_KEYS: Final = (
    "model",
    "draft_tensor_parallel_size",
    "max_model_len",
    "quantization",
    "revision",
    "code_revision",
    "moe_backend",
    "attention_backend",
    "kv_cache_dtype",
    "enforce_eager",
    "disable_padded_drafter_batch",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
    "disable_by_batch_size",
    "draft_lm_head_quantization",
    "use_local_argmax_reduction",
    "parallel_drafting",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "enable_adaptive_verification",
    "draft_sample_method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Names and defaults are vLLM's; `cache` is a method of ours."""

    method: Literal["mtp", "ngram", "suffix", "cache"]
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig:
        """From a mapping or its JSON text. Raises ConfigError for anything else, for unknown names and for methods
        that are not here."""
        if isinstance(given, cls):
            return given
        name, known = "speculative_config", [item.name for item in fields(cls)]
        found = json_object(name, given)
        for key in found:
            if key.startswith("suffix_") and key in known and found.get("method") != "suffix":
                raise ConfigError(f"{name}: {key!r} is a field of the method 'suffix' alone; leave it out")
            if key not in known:
                why = (
                    "is a field of vLLM's that is not supported here" if key in VLLM_SPECULATIVE_KEYS else "is unknown"
                )
                raise ConfigError(f"{name}: {key!r} {why}; fields are {', '.join(known)}")
        as_many_as_fit = found.get("method") == "suffix" and found.get("num_speculative_tokens") is None
        found |= {"num_speculative_tokens": MAX_DRAFTS} if as_many_as_fit else {}
        for key in ("method", "num_speculative_tokens"):
            if found.get(key) is None:
                raise ConfigError(f"{name}={given!r} needs {key!r}, as in {EXAMPLE_OF_SPECULATION}")
        config = checked_types(cls(**found))
        config._check_suffixes(f"{name}: suffix_decoding_")
        if as_many_as_fit:
            most = config.suffix_decoding_max_tree_depth - LEAST_MATCH
            config = replace(config, num_speculative_tokens=most)
        _CHECK.integer(f"{name}: num_speculative_tokens", config.num_speculative_tokens, 1, MAX_DRAFTS)
        least, most = config.lookup_range
        _CHECK.integer(f"{name}: prompt_lookup_min", least, 1, MAX_LOOKUP)
        _CHECK.integer(f"{name}: prompt_lookup_max", most, least, MAX_LOOKUP)
        return config

    def _check_suffixes(self, prefix: str) -> None:
        _CHECK.integer(f"{prefix}max_tree_depth", self.suffix_decoding_max_tree_depth, LEAST_MATCH + 1, MAX_LOOKUP)
        _CHECK.integer(f"{prefix}max_cached_requests", self.suffix_decoding_max_cached_requests, 0, MAX_POSITIONS)
        _CHECK.number(f"{prefix}max_spec_factor", self.suffix_decoding_max_spec_factor, 0, MAX_LOOKUP)
        _CHECK.number(f"{prefix}min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The fewest and the most tokens that have to agree; as in vLLM one stands for both, and 5 for neither, or
        what past outputs are matched by."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        default = (
            [LEAST_MATCH, self.suffix_decoding_max_tree_depth - 1] if self.method == "suffix" else [DEFAULT_LOOKUP]
        )
        given = [length for length in (least, most) if length is not None] or default
        return given[0], given[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that `LLM(...)` and the command line accept."""

    model: str = option(
        "",
        "a model folder, or a model's id on the Hugging Face hub; the commands' default: the demo model of a checkout",
    )
    tokenizer: str | None = option(None, "a tokenizer folder or hub id, where it is not the model's")
    revision: str | None = option(None, "branch, tag or commit of the hub's model; default: main")
    tokenizer_revision: str | None = option(None, "the same of a tokenizer that is named by its hub id")
    download_dir: str | None = option(
        None, "where models of the hub are kept; default: Hugging Face's cache, which HF_HOME moves"
    )
    skip_tokenizer_init: bool = option(False, "token ids in, token ids out")
    load_format: Literal["auto", "dummy"] = option("auto", "'dummy' makes random weights from config.json alone")
    use_tqdm_on_load: bool = option(True, "show a bar on a terminal while weights load and graphs are recorded")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of weights and activations; auto: as in config.json"
    )
    quantization: Literal["fp8"] | None = option(
        None, "fp8: put the matrices of a model that is not quantised in FP8 as they load; FP8 models need no option"
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = option(
        "auto", "of keys and values; auto: the model's; fp8: 8 bits (e4m3) with a scale for each token and head"
    )
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] = option("float32", "of the recurrent matrix states")
    state_write_interval: int | None = option(
        None,
        "tokens that a decoding request computes between two writes of its recurrent states, of which it keeps small "
        "records: 1, 2, 4, .. 64; default: 8 on a GPU or NPU (1 with --deterministic or few --max-num-seqs), else 1",
    )
    device: str = option(
        "auto",
        "where the model runs: cpu, cuda, cuda:<index>, npu (Ascend; see docs/ascend.md), or a kind that an "
        "installed package adds; auto: a GPU or an NPU if there is one",
    )
    tensor_parallel_size: int = option(
        1,
        "devices that share every layer of the model, a process each; on CPUs processes that share the host",
        short="-tp",
    )
    distributed_executor_backend: Literal["uni", "mp"] = option(
        "uni",
        "where the model runs: in the engine's process, or, with 'mp', in one of its own, as several ranks always do",
    )
    max_model_len: int | None = option(None, "prompt plus output tokens; default: the model's limit")
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the arena; default: on a CPU room for 4 requests of max_model_len, at most a quarter of free memory; "
        "on a GPU what gpu_memory_utilization leaves",
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory for everything: weights, activations, graphs and arena"
    )
    enforce_eager: bool = option(False, "launch every kernel by itself instead of replaying recorded CUDA graphs")
    chat_template: str | None = option(None, "a Jinja file, or the template itself")
    generation_config: str = option(
        "auto",
        "sampling defaults: 'auto' takes those of the model's generation_config.json, 'vllm' neutral ones, and a path "
        "those of another file or folder",
        metavar="auto|vllm|PATH",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None, 'JSON: sampling defaults that go before the file\'s, such as {"temperature": 0.5}', metavar="JSON"
    )
    seed: int = option(0, "of sampling where a request names none, and of dummy weights")
    deterministic: bool = option(False, "cached and uncached runs agree bit for bit, in any batch")
    cpu_ops: str = option(
        "auto",
        "CPU operators: 'cpp' compiles ours once, 'torch' needs no compiler, 'auto' takes cpp where one is found; or "
        "those of an installed package, or MODULE:FUNCTION",
        metavar="auto|torch|cpp|NAME",
    )
    force_state_copy: bool = option(False, "copy states before each step even where an operator can redirect")
    num_threads: int | None = option(None, "CPU threads; default: torch's own choice")
    log_requests: str | None = option(
        None, "append a JSON line for every request to this file: times, lengths, block hashes; `simulate` replays it"
    )
    log_request_tokens: bool = option(False, "with --log-requests: write token ids instead of block hashes")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "of the log on standard error")
    structured_outputs_config: StructuredOutputsConfig = mapping_option(
        ': {"disable_any_whitespace": true} has all JSON outputs written without line breaks', StructuredOutputsConfig
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        f"JSON: draft tokens and verify several of them in one step: {EXAMPLE_OF_SPECULATION}; methods are mtp, ngram, "
        "suffix and cache",
        metavar="JSON",
    )
    kv_events_config: KVEventsConfig = mapping_option(
        ': {"enable_kv_cache_events": true} publishes on ZeroMQ which blocks can be restored', KVEventsConfig
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # options of SchedulerConfig; else the device's defaults

    @classmethod
    def from_flat(cls, **options: Any) -> EngineConfig:
        """Build from one flat set of options, as `LLM(...)` and the command line take them.

        Raises ConfigError for an unknown name, with the nearest known ones, and for a bad value.
        """
        groups: dict[str, type] = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        known = {f.name: "" for f in fields(cls) if f.name not in groups}
        known |= {f.name: group for group, kind in groups.items() for f in fields(kind)}
        unknown = [name for name in options if name not in known]
        if unknown:
            import difflib

            near = difflib.get_close_matches(unknown[0], known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"unknown option {unknown[0]!r}{hint} All options: {', '.join(sorted(known))}")
        if (name := "structured_outputs_config") in options:
            options[name] = StructuredOutputsConfig.of(options[name])
        if options.get(name := "speculative_config") is not None:
            options[name] = SpeculativeConfig.of(options[name])
        if (name := "kv_events_config") in options:
            options[name] = KVEventsConfig.of(options[name])
        if options.get(name := "override_generation_config") is not None:
            options[name] = json_object(name, options[name], GENERATION_KEYS)
        of = {group: {k: v for k, v in options.items() if known[k] == group} for group in ("", *groups)}
        scheduler = {k: v for k, v in of["scheduler"].items() if v is not None}
        checked_types(SchedulerConfig(**scheduler))
        config = checked_types(cls(**of[""], cache=checked_types(CacheConfig(**of["cache"])), scheduler=scheduler))
        config.validate()
        return config

    def validate(self) -> None:
        """Raises ConfigError naming the option, what was given, and what is allowed."""
        sched, cache = self.scheduler, self.cache
        budget, rows = sched.get("max_num_batched_tokens"), sched.get("max_num_seqs")
        _CHECK.number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above=True)
        for name, given, low, high in (
            ("max_queue_len", sched.get("max_queue_len"), 1, MAX_POSITIONS),
            ("num_ghosts", cache.num_ghosts, 0, MAX_POSITIONS),
            ("checkpoint_interval", cache.checkpoint_interval, 0, MAX_POSITIONS),
            ("max_model_len", self.max_model_len, 1, MAX_POSITIONS),
            ("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MAX_INTEGER),
            ("num_threads", self.num_threads, 1, MAX_THREADS),
            ("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS),
            ("max_num_batched_tokens", budget, MIN_CHUNK, MAX_POSITIONS),
            ("max_num_seqs", rows, 1, MAX_ROWS),
        ):
            if given is not None:
                _CHECK.integer(name, given, low, high)
        if cache.checkpoint_interval % BLOCK_SIZE:
            raise ConfigError(
                f"checkpoint_interval={cache.checkpoint_interval} must be a multiple of {BLOCK_SIZE}, or 0"
            )
        interval = self.state_write_interval
        if interval is not None and (interval < 1 or BLOCK_SIZE % interval):
            raise ConfigError(f"state_write_interval={interval} must be 1, 2, 4, 8, 16, 32 or {BLOCK_SIZE}")
        if budget is not None and rows is not None and budget < rows + MIN_CHUNK - 1:
            raise ConfigError(
                f"max_num_batched_tokens={budget} must exceed max_num_seqs={rows} by {MIN_CHUNK - 1} or more, so that "
                "a full decode batch leaves room for a prefill chunk"
            )
        if self.deterministic and self.speculative_config and self.mamba_ssm_cache_dtype != "float32":
            raise ConfigError(
                "--deterministic with --speculative-config needs --mamba-ssm-cache-dtype float32: states in bfloat16 "
                "are rounded after each token without drafts, and after several with them"
            )


def json_object(name: str, given: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
    """A mapping, or its JSON text. Raises ConfigError for anything else, and for keys that are not `known`."""
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={given!r} is no JSON: {error}") from error
    if not isinstance(found, Mapping) or (known is not None and not set(found) <= set(known)):
        keys = f" with {' or '.join(known)}" if known is not None else ""
        raise ConfigError(f"{name}={given!r} is not allowed; give a JSON object{keys}")
    return dict(found)


def checked_types(options: Options) -> Options:
    """The same dataclass of options with plain values of the types that its fields name. Raises ConfigError."""
    hints = get_type_hints(type(options))
    plain = {name: kind for name, kind in hints.items() if not is_dataclass(kind)}
    return replace(options, **{name: _of_type(name, getattr(options, name), kind) for name, kind in plain.items()})  # type: ignore[type-var]


def _of_type(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (arg for arg in get_args(kind) if arg is not types.NoneType)
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        _CHECK.require(
            isinstance(value, str) and value in allowed, name, value, f"one of {', '.join(map(repr, allowed))}"
        )
        return value
    if kind is bool:
        return _CHECK.flag(name, value)
    if kind is int:
        return _CHECK.integer(name, value, -MAX_INTEGER - 1, MAX_INTEGER, "an integer of at most 64 bits")
    if kind is float:
        return _CHECK.number(name, value, -1e300, 1e300)
    if get_origin(kind) is Mapping or is_dataclass(kind):
        return value  # read by `from_flat`
    assert kind is str, f"no check for options of type {kind}"
    return _CHECK.text(name, os.fspath(value) if isinstance(value, os.PathLike) else value, MAX_OPTION_CHARS)

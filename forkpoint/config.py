"""Engine options. Field names are vLLM's flags with underscores; help texts serve the command line too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from forkpoint.checks import MAX_INTEGER, Bounds, Checker, checked_fields, option
from forkpoint.errors import ConfigError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.image_families.table import PROCESSOR_KWARGS, read_image_settings

BLOCK_SIZE: Final = 64  # tokens per block of keys and values, and the grid of checkpoints
MIN_CHUNK: Final = BLOCK_SIZE  # tokens that every step leaves for prefill, even with a full decode batch
CHECKPOINT_INTERVAL = 512
ENCODER_CACHE_SIZE: Final = 1 << 15  # tokens: 32 images of 1024x1024 pixels, 256 MiB for a 9B model in bfloat16
GENERATION_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
MAX_POSITIONS: Final = 2**31 - 1  # positions are int32 on the device
MAX_IMAGES: Final = 32  # images of a prompt where no limit is given
MOST_IMAGES: Final = 1024
MAX_EVENTS: Final = 2**30 - 1
MAX_ROWS: Final = 2**16
MAX_THREADS: Final = 1024
MAX_RANKS: Final = 64
GIB: Final = 2**30
MAX_HOST_GIB: Final = 2**20
MAX_DRAFTS: Final = 63  # drafts per row and step, so that a row crosses at most one block boundary
DEFAULT_LOOKUP: Final = 5
LEAST_MATCH: Final = 3  # tokens of a past output that must match before it is searched
MAX_LOOKUP: Final = 64
MTP_NAMES: Final = ("qwen3_next_mtp", "qwen3_5_mtp")  # vLLM's older names of 'mtp'
SUFFIX_ALONE: Final = "is a field of the method 'suffix' alone; leave it out"
EXAMPLE_OF_TRANSFER: Final = (
    '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}}'
)
EXAMPLE_OF_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'

_CHECK: Final = Checker(ConfigError)
Options = TypeVar("Options")


def bounded(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number that has no command-line flag of its own."""
    return option(default, bounds=Bounds(low, high))


def mapping_option(help: str, default: Callable[[], Any] = dict) -> Any:
    """Declare an option that is a mapping, given as JSON. The default is empty, or the result of `default`."""
    return field(default_factory=default, metadata={"help": f"JSON{help}", "metavar": "JSON"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Options of the prefix cache."""

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
        bounds=Bounds(0, MAX_POSITIONS),
    )
    num_ghosts: int = option(
        65536, "evicted entries remembered for miss reasons and junction detection", Bounds(0, MAX_POSITIONS)
    )

    @property
    def checkpoints(self) -> bool:
        return self.enable_prefix_caching and self.mamba_cache_mode == "align"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Options of the scheduler."""

    max_num_batched_tokens: int = option(
        2048,
        "token budget of one step; a multiple of 64 wastes nothing; default: 2048 on a CPU, 8192 on a GPU",
        Bounds(MIN_CHUNK, MAX_POSITIONS),
    )
    max_num_seqs: int = option(64, "requests that run at once; default: 64 on a CPU, 256 on a GPU", Bounds(1, MAX_ROWS))
    max_queue_len: int = option(4096, "waiting requests beyond which new ones are refused", Bounds(1, MAX_POSITIONS))
    max_num_encoder_input_tokens: int | None = option(
        None,
        "tokens of images that the vision tower encodes in one step; a larger image is encoded in a step of its own; "
        "default: max_num_batched_tokens",
        Bounds(1, MAX_POSITIONS),
    )
    encoder_cache_size: int = option(
        ENCODER_CACHE_SIZE, "tokens of images whose embeddings are kept on the device", Bounds(0, MAX_POSITIONS)
    )
    async_scheduling: bool = option(False, "plan step n+1 before the result of step n is known; default: on a GPU only")

    @property
    def encoder_budget(self) -> int:
        """The tokens of images that one step may encode."""
        return self.max_num_encoder_input_tokens or self.max_num_batched_tokens

    def with_options(self, said: Mapping[str, Any]) -> SchedulerConfig:
        """Return a device's defaults overridden by `said`, with the remaining defaults adjusted to fit."""
        found = replace(self, **said)
        if "max_num_batched_tokens" not in said:
            least = -(-(found.max_num_seqs + MIN_CHUNK) // BLOCK_SIZE) * BLOCK_SIZE
            return replace(found, max_num_batched_tokens=max(found.max_num_batched_tokens, least))
        if "max_num_seqs" not in said:
            return replace(found, max_num_seqs=min(found.max_num_seqs, found.max_num_batched_tokens - MIN_CHUNK + 1))
        return found


class JsonConfig:
    """Options that are given together, as an object, a mapping or JSON text, under the name `option_name`.

    Raises ConfigError for values of wrong types or out of range."""

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
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
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

    def __post_init__(self) -> None:
        super(SpeculativeConfig, self).__post_init__()  # dataclass slots replace the class, so a bare super() fails
        name, least, most = self.option_name, *self.lookup_range
        _CHECK.integer(f"{name}: prompt_lookup_max", most, least, MAX_LOOKUP)
        for item in fields(self) if self.method != "suffix" else ():
            if item.name.startswith("suffix_") and getattr(self, item.name) != item.default:
                raise ConfigError(f"{name}: {item.name!r} {SUFFIX_ALONE}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Read the options. Without a number of tokens, `suffix` drafts as many as its depth allows."""
        given = {**given, "method": "mtp"} if given.get("method") in MTP_NAMES else given
        as_many_as_fit = given.get("method") == "suffix" and given.get("num_speculative_tokens") is None
        found = {**given, "num_speculative_tokens": MAX_DRAFTS} if as_many_as_fit else given
        for key in ("method", "num_speculative_tokens"):
            if found.get(key) is None:
                raise ConfigError(f"{cls.option_name}={given!r} needs {key!r}, as in {EXAMPLE_OF_SPECULATION}")
        config = super(SpeculativeConfig, cls).read(found)
        if config.method != "suffix" and (wrong := [name for name in given if name.startswith("suffix_")]):
            raise ConfigError(f"{cls.option_name}: {wrong[0]!r} {SUFFIX_ALONE}")
        if as_many_as_fit:
            config = replace(config, num_speculative_tokens=config.suffix_decoding_max_tree_depth - LEAST_MATCH)
        return config

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The fewest and the most tokens that must match.

        As in vLLM, one option stands for both. Without either, both are 5, or the range of past outputs for
        `suffix`."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        default = (
            [LEAST_MATCH, self.suffix_decoding_max_tree_depth - 1] if self.method == "suffix" else [DEFAULT_LOOKUP]
        )
        given = [length for length in (least, most) if length is not None] or default
        return given[0], given[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig(JsonConfig):
    """Options for keeping evicted cache entries. Names are vLLM's, and its connector to the host's memory is the only
    one here."""

    option_name = "kv_transfer_config"
    kv_connector: Literal["OffloadingConnector"]
    kv_role: Literal["kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(KVTransferConfig, self).__post_init__()  # dataclass slots replace the class, so a bare super() fails
        name = f"{self.option_name}: kv_connector_extra_config"
        extra = json_object(name, self.kv_connector_extra_config, ("cpu_bytes_to_use",))
        object.__setattr__(self, "kv_connector_extra_config", extra)
        if "cpu_bytes_to_use" not in extra:
            raise ConfigError(f"{name} needs 'cpu_bytes_to_use', as in {EXAMPLE_OF_TRANSFER}")
        _CHECK.integer(f"{name}: cpu_bytes_to_use", extra["cpu_bytes_to_use"], 1, MAX_INTEGER)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        if "kv_connector" not in given:
            raise ConfigError(f"{cls.option_name}={given!r} needs 'kv_connector', as in {EXAMPLE_OF_TRANSFER}")
        return super(KVTransferConfig, cls).read(given)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the host's memory for evicted entries, of all ranks together."""
        return int(self.kv_connector_extra_config["cpu_bytes_to_use"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options that `LLM(...)` and the command line accept."""

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
        bounds=Bounds(1, MAX_RANKS),
        short="-tp",
    )
    distributed_executor_backend: Literal["uni", "mp"] = option(
        "uni",
        "where the model runs: in the engine's process, or, with 'mp', in one of its own, as several ranks always do",
    )
    max_model_len: int | None = option(
        None, "prompt plus output tokens; default: the model's limit", Bounds(1, MAX_POSITIONS)
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the arena; default: on a CPU room for 4 requests of max_model_len, at most a quarter of free memory; "
        "on a GPU what gpu_memory_utilization leaves",
        bounds=Bounds(1, MAX_INTEGER),
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of the host's memory, of all ranks together, for what the arena evicts: prefixes found there are copied "
        "back; default: none",
        bounds=Bounds(0, MAX_HOST_GIB, above=True),
    )
    kv_offloading_backend: Literal["native"] = option("native", "what keeps evicted entries; forkpoint has one")
    kv_transfer_config: KVTransferConfig | None = option(
        None,
        f"JSON: the same as kv_offloading_size, as vLLM's connector takes it: {EXAMPLE_OF_TRANSFER}",
        metavar="JSON",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory for everything: weights, activations, graphs and arena",
        bounds=Bounds(0, 1, above=True),
    )
    enforce_eager: bool = option(False, "launch every kernel by itself instead of replaying recorded CUDA graphs")
    language_model_only: bool = option(
        False, "run the text model of a multimodal folder alone: the vision tower is not loaded and images are refused"
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        f'images that a prompt may have: image=4, or JSON such as {{"image": 4}}; default: {MAX_IMAGES}',
        metavar="JSON",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "JSON: min_pixels and max_pixels of an image after it is resized, or other settings of the model's processor; "
        "default: the model's, and at most 4194304 pixels, which are 4096 tokens of Qwen3.5",
        metavar="JSON",
    )
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
    num_threads: int | None = option(None, "CPU threads; default: torch's own choice", Bounds(1, MAX_THREADS))
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
        short="-sc",
    )
    kv_events_config: KVEventsConfig = mapping_option(
        ': {"enable_kv_cache_events": true} publishes on ZeroMQ which blocks can be restored', KVEventsConfig
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # options of SchedulerConfig; else the device's defaults

    @classmethod
    def from_flat(cls, **options: Any) -> EngineConfig:
        """Build the options from one flat mapping, as `LLM(...)` and the command line take them.

        Raises ConfigError for an unknown name, with the nearest known ones, and for a bad value.
        """
        groups: dict[str, type] = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        known = {f.name: "" for f in fields(cls) if f.name not in groups}
        known |= {f.name: group for group, kind in groups.items() for f in fields(kind)}
        unknown = [name for name in options if name not in known]
        if unknown:
            import difflib

            near = difflib.get_close_matches(unknown[0], known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            raise ConfigError(f"unknown option {unknown[0]!r}{hint} All options: {', '.join(sorted(known))}")
        for kind in (StructuredOutputsConfig, SpeculativeConfig, KVEventsConfig, KVTransferConfig):
            if options.get(kind.option_name) is None:
                options.pop(kind.option_name, None)  # use the default
            else:
                options[kind.option_name] = kind.of(options[kind.option_name])
        if options.get(name := "override_generation_config") is not None:
            options[name] = json_object(name, options[name], GENERATION_KEYS)
        if options.get(name := "limit_mm_per_prompt") is not None:
            options[name] = image_limit(media_limits(name, options[name]))
        if options.get(name := "mm_processor_kwargs") is not None:
            options[name] = json_object(name, options[name], PROCESSOR_KWARGS)
        of = {group: {k: v for k, v in options.items() if known[k] == group} for group in ("", *groups)}
        scheduler = {k: v for k, v in of["scheduler"].items() if v is not None}
        checked(SchedulerConfig(**scheduler))
        config = checked(cls(**of[""], cache=checked(CacheConfig(**of["cache"])), scheduler=scheduler))
        config.validate()
        return config

    def read_image_settings(self) -> ImageSettings | None:
        """Return how the model folder wants images to be read; None for a model without a vision tower, or if it is not
        to be loaded. Raises ModelFolderError and ConfigError."""
        return None if self.language_model_only else read_image_settings(self.model, self.mm_processor_kwargs)

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of the host's memory for evicted entries, of all ranks together; 0: nothing is kept there."""
        if self.kv_transfer_config is not None:
            return self.kv_transfer_config.cpu_bytes
        return math.ceil((self.kv_offloading_size or 0) * GIB)

    @property
    def max_images(self) -> int:
        """The most images of a prompt."""
        return int((self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES))

    def validate(self) -> None:
        """Raise a ConfigError that names the option, what was given and what is allowed."""
        sched, cache = self.scheduler, self.cache
        budget, rows = sched.get("max_num_batched_tokens"), sched.get("max_num_seqs")
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
        if self.kv_transfer_config is not None and self.kv_offloading_size is not None:
            raise ConfigError("kv_offloading_size and kv_transfer_config both give the host tier's size; give one")
        if self.host_tier_bytes and not cache.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size needs the prefix cache, whose evicted entries it keeps; leave "
                "--no-enable-prefix-caching out"
            )
        if self.deterministic and self.speculative_config and self.mamba_ssm_cache_dtype != "float32":
            raise ConfigError(
                "--deterministic with --speculative-config needs --mamba-ssm-cache-dtype float32: states in bfloat16 "
                "are rounded after each token without drafts, and after several with them"
            )


def image_limit(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the limit for images. Other kinds of media are never read, so a limit of theirs changes nothing. Raises
    ConfigError."""
    if "image" not in given:
        return {}
    limit = given["image"]
    if isinstance(limit, Mapping):  # vLLM also takes the sizes of the images with which it measures memory
        limit = limit.get("count", MAX_IMAGES)
    return {"image": _CHECK.integer("limit_mm_per_prompt: image", limit, 0, MOST_IMAGES)}


def media_limits(name: str, given: Any) -> dict[str, Any]:
    """Read a mapping, its JSON text, or vLLM's short form `image=4,video=2`. Raises ConfigError."""
    if isinstance(given, str) and re.fullmatch(r"\w+=\d{1,9}(,\w+=\d{1,9})*", given):
        return {kind: int(count) for kind, _, count in (pair.partition("=") for pair in given.split(","))}
    return json_object(name, given)


def json_object(name: str, given: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
    """Read a mapping or its JSON text. Raises ConfigError for anything else, and for keys that are not `known`."""
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


def checked(options: Options) -> Options:
    """Return the options with plain values, checked against the types and bounds of their fields. Raises
    ConfigError."""
    return replace(options, **checked_fields(options, _CHECK))  # type: ignore[type-var]

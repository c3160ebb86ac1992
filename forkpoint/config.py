"""Engine options. Field names are vLLM's flags with underscores; help texts serve the command line too."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar

from forkpoint.checks import MAX_INTEGER, MAX_POSITIONS, Bounds, Checker, checked_fields, option
from forkpoint.errors import ConfigError
from forkpoint.image_families.media_io import MEDIA
from forkpoint.image_families.settings import ImageSettings
from forkpoint.image_families.table import PROCESSOR_KWARGS, read_image_settings
from forkpoint.json_options import (
    EXAMPLE_OF_SPECULATION,
    KVEventsConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    json_object,
)
from forkpoint.media_limits import MAX_IMAGES, read_media_limits
from forkpoint.option_rules import check_context, check_disk
from forkpoint.transfer_options import EXAMPLE_OF_TRANSFER, KVTransferConfig

BLOCK_SIZE: Final = 64  # tokens per block of keys and values, and the grid of checkpoints
MIN_CHUNK: Final = BLOCK_SIZE  # tokens that every step leaves for prefill, even with a full decode batch
CHECKPOINT_INTERVAL = 512
ENCODER_CACHE_SIZE: Final = 1 << 15  # tokens: 32 images of 1024x1024 pixels, 256 MiB for a 9B model in bfloat16
GENERATION_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
MAX_ROWS: Final = 2**16
MAX_THREADS: Final = 1024
MAX_RANKS: Final = 64
GIB: Final = 2**30
MAX_HOST_GIB: Final = 2**20
DISK_WRITE_LIMIT: Final = 512  # GiB a day; consumer drives are rated for a few hundred over years

_CHECK: Final = Checker(ConfigError)
Options = TypeVar("Options")


def mapping_option(help: str, default: Callable[[], Any] = dict) -> Any:
    """Declare an option that is a mapping, given as JSON, which `help` continues. `default` creates its default."""
    return field(default_factory=default, metadata={"help": f"JSON{help}", "metavar": "JSON"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Options of the prefix cache."""

    enable_prefix_caching: bool = option(True, "reuse keys, values and states of earlier prompts")
    mamba_cache_mode: Literal["align", "none"] = option(
        "align", "'none' keeps no state checkpoints, so hybrid models never hit ('align' is vLLM's name for on)"
    )
    eviction_policy: str = option(
        "cost", "which entries are evicted first when the arena is full: cost, lru, a package's own, or module:Class"
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
    max_inter_token_latency_ms: int | None = option(
        None,
        "milliseconds that a step with running answers should take at most: prompts next to them get fewer tokens a "
        "step; default: no limit",
        Bounds(1, 3_600_000),
    )
    async_scheduling: bool = option(False, "plan step n+1 before the result of step n is known; default: on a GPU only")

    @property
    def encoder_budget(self) -> int:
        """The tokens of images that one step may encode."""
        return self.max_num_encoder_input_tokens or self.max_num_batched_tokens

    def with_options(self, said: Mapping[str, Any]) -> SchedulerConfig:
        """Return these defaults of a device overridden by `said`.

        One default follows the options: `max_num_batched_tokens` is raised to hold `max_num_seqs` rows and a chunk of
        prefill. If only that budget is given, `max_num_seqs` is lowered to fit it.
        """
        found = replace(self, **said)
        if "max_num_batched_tokens" not in said:
            least = -(-(found.max_num_seqs + MIN_CHUNK) // BLOCK_SIZE) * BLOCK_SIZE
            return replace(found, max_num_batched_tokens=max(found.max_num_batched_tokens, least))
        if "max_num_seqs" not in said:
            return replace(found, max_num_seqs=min(found.max_num_seqs, found.max_num_batched_tokens - MIN_CHUNK + 1))
        return found


# vLLM's names of the formats of weights
Quantization = Literal[
    "fp8",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "compressed-tensors",
    "gptq",
    "gptq_marlin",
    "awq",
    "awq_marlin",
    "auto-round",
    "inc",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options that `LLM(...)` and the command line accept. Create it with `from_flat`, which checks them."""

    model: str = option(
        "",
        "a model folder, or an id on the Hugging Face hub; default of commands: the demo model of the checkout",
    )
    tokenizer: str | None = option(None, "a tokenizer folder or hub id, where it is not the model's")
    revision: str | None = option(None, "branch, tag or commit of the hub's model; default: main")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of a tokenizer on the hub; default: main")
    download_dir: str | None = option(
        None, "folder for models of the hub; default: Hugging Face's cache, which HF_HOME moves"
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids")
    load_format: Literal["auto", "safetensors", "fastsafetensors", "dummy"] = option(
        "auto", "'dummy' makes random weights from config.json alone; the other names all read safetensors"
    )
    use_tqdm_on_load: bool = option(True, "show a bar on a terminal while weights load and graphs are recorded")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "dtype of weights and activations; auto: as in config.json"
    )
    quantization: Quantization | None = option(
        None,
        "fp8: put the matrices of a model that is not quantised in FP8 as they load; quantised models need no option, "
        "and another format than theirs is refused",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = option(
        "auto", "dtype of keys and values; auto: the model's; fp8: 8 bits (e4m3) with a scale for each token and head"
    )
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of the recurrent matrix states; bfloat16 halves a checkpoint"
    )
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
    decode_context_parallel_size: int = option(
        1,
        "devices that divide the tokens of the same keys and values instead of keeping copies; it divides "
        "tensor_parallel_size",
        bounds=Bounds(1, MAX_RANKS),
        short="-dcp",
    )
    cp_kv_cache_interleave_size: int | None = option(
        None,
        f"consecutive tokens that one such device keeps; default, and at most: {BLOCK_SIZE} "
        "/ decode_context_parallel_size",
        bounds=Bounds(1, MAX_INTEGER),
    )
    distributed_executor_backend: Literal["uni", "mp"] = option(
        "uni",
        "where the model runs: in the engine's process, or, with 'mp', in one of its own, as several ranks always do",
    )
    max_model_len: int | None = option(
        None,
        "prompt plus output tokens, such as 32768 or 32K; default, and auto: the model's limit",
        Bounds(1, MAX_POSITIONS),
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the arena; default: on a CPU room for 4 requests of max_model_len, at most a quarter of free memory; "
        "on a GPU what gpu_memory_utilization leaves",
        bounds=Bounds(1, MAX_INTEGER),
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of the host's memory, of all ranks together, for entries that the arena evicts; default: none",
        bounds=Bounds(0, MAX_HOST_GIB, above=True),
    )
    kv_offloading_backend: Literal["native"] = option("native", "what keeps evicted entries; forkpoint has one")
    kv_transfer_config: KVTransferConfig | None = option(
        None,
        "JSON: an exchange of prompts between prefill and decode engines, with NixlConnector and a kv_role, or the "
        f"same as kv_offloading_size, as vLLM's connector takes it: {EXAMPLE_OF_TRANSFER}",
        metavar="JSON",
    )
    kv_disk_path: str | None = option(
        None,
        "a folder for entries that the arena or the host tier evicts; a restarted engine finds them; default: none",
        metavar="DIR",
    )
    kv_disk_size: float | None = option(
        None,
        "GiB of each model's files in kv_disk_path, of all ranks together",
        bounds=Bounds(0, MAX_HOST_GIB, above=True),
    )
    kv_disk_write_limit: float | None = option(
        None,
        f"GiB that are written to kv_disk_path in 24 hours, of all ranks together; default: {DISK_WRITE_LIMIT}",
        bounds=Bounds(0, MAX_HOST_GIB),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory for everything: weights, activations, graphs and arena",
        bounds=Bounds(0, 1, above=True),
    )
    enforce_eager: bool = option(False, "launch every kernel by itself instead of replaying recorded CUDA graphs")
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        'JSON: values in place of those of config.json, such as {"max_position_embeddings": 65536}; objects such as '
        "text_config are merged",
        metavar="JSON",
    )
    language_model_only: bool = option(
        False, "run the text model of a multimodal folder alone: the vision tower is not loaded and images are refused"
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        f'images and videos that a prompt may have: image=4,video=1, or JSON such as {{"image": 4}}; default: '
        f"{MAX_IMAGES} of each",
        metavar="JSON",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "JSON: min_pixels and max_pixels of an image after it is resized, or other settings of the model's processor; "
        "default: the model's, and at most 4194304 pixels, which are 4096 tokens of Qwen3.5",
        metavar="JSON",
    )
    media_io_kwargs: Mapping[str, Any] | None = option(
        None,
        "JSON: how files are read, by 'image' (rgba_background_color) and 'video' (num_frames, fps); default: "
        "transparent parts become white, and frames are sampled as the model's folder says",
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
        None, 'JSON: sampling defaults that override the file\'s, such as {"temperature": 0.5}', metavar="JSON"
    )
    seed: int = option(0, "seed of dummy weights, and of sampling if a request gives none")
    deterministic: bool = option(False, "cached and uncached runs agree bit for bit, in any batch")
    cpu_ops: str = option(
        "auto",
        "CPU operators: 'cpp' compiles forkpoint's once, 'torch' needs no compiler, 'auto' takes cpp if there is one; "
        "or those of an installed package, or MODULE:FUNCTION",
        metavar="auto|torch|cpp|NAME",
    )
    force_state_copy: bool = option(False, "copy states before each step even where an operator can redirect")
    num_threads: int | None = option(None, "CPU threads; default: torch's own choice", Bounds(1, MAX_THREADS))
    log_requests: str | None = option(
        None, "append a JSON line for every request to this file: times, lengths, block hashes; `simulate` replays it"
    )
    log_request_tokens: bool = option(False, "with --log-requests: write token ids instead of block hashes")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "level of the log on standard error")
    structured_outputs_config: StructuredOutputsConfig = mapping_option(
        ': {"disable_any_whitespace": true} writes all JSON outputs without line breaks', StructuredOutputsConfig
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
            hint = f"did you mean {', '.join(near)}?" if near else f"give one of {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {unknown[0]!r}; {hint}")
        for kind in (StructuredOutputsConfig, SpeculativeConfig, KVEventsConfig, KVTransferConfig):
            if options.get(kind.option_name) is None:
                options.pop(kind.option_name, None)  # use the default
            else:
                options[kind.option_name] = kind.of(options[kind.option_name])
        if options.get(name := "override_generation_config") is not None:
            options[name] = json_object(name, options[name], GENERATION_KEYS)
        if options.get(name := "limit_mm_per_prompt") is not None:
            options[name] = read_media_limits(name, options[name])
        if options.get(name := "hf_overrides") is not None:
            options[name] = json_object(name, options[name])
        if options.get(name := "mm_processor_kwargs") is not None:
            options[name] = json_object(name, options[name], PROCESSOR_KWARGS)
        if options.get(name := "media_io_kwargs") is not None:
            options[name] = json_object(name, options[name], MEDIA)
        of = {group: {k: v for k, v in options.items() if known[k] == group} for group in ("", *groups)}
        scheduler = {k: v for k, v in of["scheduler"].items() if v is not None}
        checked(SchedulerConfig(**scheduler))
        config = checked(cls(**of[""], cache=checked(CacheConfig(**of["cache"])), scheduler=scheduler))
        config.validate()
        return config

    def read_image_settings(self) -> ImageSettings | None:
        """Return how images are prepared, as the model folder and `mm_processor_kwargs` say.

        None: prompts may have none of the media that the model reads, or it has no vision tower that forkpoint runs.
        Raises ModelFolderError for files that are wrong, and ConfigError for `mm_processor_kwargs` that do not fit.
        """
        if self.language_model_only or self.max_images == self.max_videos == 0:
            return None
        found = read_image_settings(self.model, self.mm_processor_kwargs, self.hf_overrides, self.media_io_kwargs)
        return None if found is not None and found.video is None and not self.max_images else found

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of the host's memory for evicted entries, of all ranks together; 0: nothing is kept there."""
        if self.kv_transfer_config is not None and not self.links_peers:
            return self.kv_transfer_config.cpu_bytes
        return math.ceil((self.kv_offloading_size or 0) * GIB)

    @property
    def shows_bars(self) -> bool:
        """Whether bars show how far loading has come."""
        return self.use_tqdm_on_load and self.log_level != "error" and sys.stderr.isatty()

    @property
    def interleave(self) -> int:
        """Tokens of a row that one rank keeps before it is the next one's turn."""
        return self.cp_kv_cache_interleave_size or BLOCK_SIZE // self.decode_context_parallel_size

    @property
    def links_peers(self) -> bool:
        """Whether the engine exchanges prompts with others."""
        return self.kv_transfer_config is not None and self.kv_transfer_config.links_peers

    @property
    def disk_tier_bytes(self) -> int:
        """Bytes of the disk tier, of all ranks together; 0: there is none."""
        return math.ceil((self.kv_disk_size or 0) * GIB)

    @property
    def disk_write_limit_bytes(self) -> int:
        """Bytes that all ranks together write to the disk tier in a day."""
        limit = DISK_WRITE_LIMIT if self.kv_disk_write_limit is None else self.kv_disk_write_limit
        return math.ceil(limit * GIB)

    @property
    def max_images(self) -> int:
        """The most images that a prompt may have."""
        return int((self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES))

    @property
    def max_videos(self) -> int:
        """The most videos of a prompt."""
        return int((self.limit_mm_per_prompt or {}).get("video", MAX_IMAGES))

    def validate(self) -> None:
        """Raise a ConfigError for options that contradict each other or that bounds alone cannot check."""
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
        offloads = self.kv_transfer_config is not None and not self.links_peers
        if offloads and self.kv_offloading_size is not None:
            raise ConfigError("kv_offloading_size and kv_transfer_config both give the host tier's size; give one")
        check_disk(self.kv_disk_path, self.kv_disk_size, self.kv_disk_write_limit)
        check_context(self.decode_context_parallel_size, self.interleave, self.tensor_parallel_size, BLOCK_SIZE)
        uses = {
            "kv_offloading_size": (self.host_tier_bytes > 0, "whose evicted entries it keeps"),
            "kv_disk_path": (self.kv_disk_path is not None, "whose evicted entries it keeps"),
            "kv_transfer_config with NixlConnector": (self.links_peers, "whose entries it exchanges"),
        }
        for name, (is_used, why) in uses.items():
            if is_used and not cache.enable_prefix_caching:
                raise ConfigError(f"{name} needs the prefix cache, {why}; leave --no-enable-prefix-caching out")
        if self.deterministic and self.speculative_config and self.mamba_ssm_cache_dtype != "float32":
            raise ConfigError(
                "--deterministic with --speculative-config needs --mamba-ssm-cache-dtype float32: states in bfloat16 "
                "are rounded after each token without drafts, and after several with them"
            )


def checked(options: Options) -> Options:
    """Return the options with plain values, checked against their fields' types and bounds. Raises ConfigError."""
    return replace(options, **checked_fields(options, _CHECK))  # type: ignore[type-var]

"""Engines on tiny real models that tests can look into: sampled logits, tokens entered, memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import DiskFacts
from forkpoint.cache.tiers import TierSizes
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.disk.store import open_store
from forkpoint.engine.core import EngineCore
from forkpoint.engine.engine import Engine
from forkpoint.engine.inputs import InputProcessor, Prompt, sequence_id
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.image_families.table import read_image_settings
from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.select import select_table
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.runner import ModelRunner
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.request import Request
from forkpoint.sched.scheduler import Scheduler
from forkpoint.worker.disk import slab_layout
from forkpoint.worker.disk_ranks import common_disk
from tests.checkpoints import write_checkpoint
from tests.engine.probe import Probe
from tests.engine.tokenizers import byte_level
from tests.four_bit_checkpoints import FORMATS, put_in_four_bits
from tests.fp8_checkpoints import Layout, write_fp8
from tests.image_models import write_vision_checkpoint
from tests.late_streams import LatePlatform
from tests.ling_vl_models import write_ling_vl
from tests.mtp_heads import add_mtp, add_published_mtp
from tests.nemotron_omni_models import write_nemotron_omni
from tests.thread_ranks import ThreadRanks

MAX_MODEL_LEN = 2048
MIX = ["linear_attention", "full_attention", "linear_attention"]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
}
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
# Name -> (family of tests.checkpoints, fields of its config). Pages hold several blocks, several slots, or one of each.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**SMALL, "head_dim": 16, "layer_types": MIX}),
    "qwen3_next_moe": ("qwen3_next_moe", {**SMALL, "head_dim": 32, "layer_types": MIX}),
    "olmo_hybrid": ("olmo_hybrid", {**SMALL, "layer_types": [*MIX[:2], *MIX[:2]], "num_hidden_layers": 4}),
    "lfm2": ("lfm2", {**SMALL, "head_dim": 16, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 16}),
}
# The same of further families, for the randomised test alone.
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_hybrid": (
        "granite_hybrid",
        {**SMALL, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_state": 16},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **SMALL,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "ssm_state_size": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
        },
    ),
    "lfm2_moe": ("lfm2_moe", {**SMALL, "head_dim": 16, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm3": (
        "lfm3",
        {**SMALL, "head_dim": 16, "layer_types": ["conv", "full_attention", "sliding_attention"]},
    ),
    "lara_mini": (
        "lara_mini",
        {**SMALL, "head_dim": 16, "layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    ),
    "mistral": ("mistral", {**SMALL, "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 100}),
    "falcon_h1": ("falcon_h1", {**SMALL, "num_hidden_layers": 2, "head_dim": 16}),
    "zamba2": (
        "zamba2",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
        },
    ),
    "mamba2": ("mamba2", {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "state_size": 16}),
    "jamba": ("jamba", {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "kimi_linear": (
        "kimi_linear",
        {**SMALL, **FOUR_HEADS, "layer_types": MIX, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **SMALL,
            "num_key_value_heads": 2,
            "layer_types": MIX,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "expert_swiglu_limit_list": [0, 0, 0.05],
            "share_expert_swiglu_limit_list": [0, 0, 0.03],
        },
    ),
    "bailing_moe_v2_5": ("bailing_moe_v2_5", {**SMALL, "layer_group_size": 3, "first_k_dense_replace": 2}),
    "alice_ai": (
        "alice_ai",
        {
            **SMALL,
            "head_dim": 16,
            "layer_types": MIX,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "block_attn_res_block_size": 2,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 32, "num_hidden_layers": 3}),
    "qwen4_exp": (
        "qwen4_exp",
        {
            **{name: value for name, value in SMALL.items() if name != "intermediate_size"},
            "head_dim": 16,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "glm5_next": (
        "glm5_next",
        {
            **SMALL,
            "num_key_value_heads": 2,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
}

# Models that read images, and what writes them.
SEEING: dict[str, Callable[..., Any]] = {
    "qwen3_5": partial(write_vision_checkpoint, mtp=True),
    "nemotron_omni": write_nemotron_omni,
    "ling_vl": write_ling_vl,
}
PUBLISHED_MTP = frozenset({"nemotron_h", "bailing_hybrid", "bailing_moe_v2_5", "glm5_next", "alice_ai", "qwen4_exp"})
WITH_MTP = PUBLISHED_MTP | {"qwen3_next", "qwen3_next_moe", "qwen3_5"}
UNCUT = frozenset({"olmo_hybrid"})  # its one KV head, which a norm over all heads sees whole
# Models whose keys two ranks cannot keep in turn: they have none to all tokens, choose some, or a rank has its own.
UNDEALT = UNCUT | {*SEEING, "mamba2", "falcon_mamba", "mistral", "qwen4_exp", "glm5_next", "zamba2"}
# Models that refuse keys and values in 8 bits.
LATENT = frozenset({"kimi_linear", "bailing_hybrid", "bailing_moe_v2_5", "ling_vl"})


@dataclass(frozen=True)
class Options:
    """One engine. `num_pages` 0: ample room."""

    model: str = "qwen3_next"
    cpu_ops: Literal["torch", "cpp"] = "torch"
    deterministic: bool = False
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    force_state_copy: bool = False
    async_scheduling: bool = False
    host_tokens: int = 0  # tokens for which the host tier has room; 0: there is none
    host_streams: float = 0.0  # its copies run late: chance that they go on when one looks; 0: they run at once
    loaded_at_once: int = 0  # bytes that a plan copies from it; 0: as usual
    disk_tokens: int = 0  # tokens for which the disk tier has room; 0: there is none
    budget: int = 2048
    max_num_seqs: int = 8
    num_pages: int = 0
    cache: CacheConfig = field(default_factory=CacheConfig)
    max_queue_len: int = 4096
    max_num_drafts: int = 0  # of a row in a step
    state_write_interval: int = 1
    mtp: bool = False
    num_ranks: int = 1  # which run as threads
    context_size: int = 1  # of the ranks, how many keep the tokens of a block in turn
    interleave: int = 0  # tokens of a turn; 0: as many as there can be
    kernel_block_sizes: tuple[int, ...] = ()
    encoder_budget: int | None = None
    encoder_cache_size: int = 1 << 15

    @property
    def numbers(self) -> dict[str, Any]:
        """The options that change a model's numbers."""
        names = ("model", "cpu_ops", "deterministic", "kv_cache_dtype", "state_dtype", "kernel_block_sizes")
        return {name: getattr(self, name) for name in names}

    @property
    def has_equal_bits(self) -> bool:
        """Whether all ranks give the bits of one rank: torch's products may add up otherwise in a matrix of fewer
        rows."""
        return self.deterministic and (self.num_ranks == 1 or self.cpu_ops == "cpp")

    @property
    def rounds_what_is_kept(self) -> bool:
        return self.kv_cache_dtype == "fp8" or self.state_dtype == "bfloat16"


class ModelBank:
    """Checkpoints written once, models loaded once for each operator table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_folders = 0
        self._models: dict[object, list[Model]] = {}
        self.ranks: dict[int, list[Ranks]] = {}  # of a list of models, by the id of its first
        self.threads = ThreadPoolExecutor(3, initializer=lambda: torch.set_num_threads(1))  # of further ranks
        self.tokenizer: Tokenizer = byte_level()
        self.vocab_size = int(self.tokenizer.backend.get_vocab_size())

    def folder(self, name: str) -> Path:
        """Return the folder of a name of MODELS. A layout after the name (":block") writes it in FP8, or in 4 bits
        (":gptq"), and ":load" has it converted as it loads."""
        base, _, layout = name.partition(":")
        path = self._folder / name.removesuffix(":load")
        if base in SEEING and not path.exists():
            SEEING[base](path, vocab_size=self.vocab_size)
        elif not path.exists():
            family, config = {**MODELS, **MORE_MODELS}[base]
            if layout in FORMATS:
                plain = path.with_name(f"{path.name}-widened")
                write_checkpoint(plain, family, vocab_size=self.vocab_size, **config)
                put_in_four_bits(plain, path, layout)
            elif layout:
                write_fp8(path, family, cast(Layout, layout), vocab_size=self.vocab_size, **config)
            else:
                write_checkpoint(path, family, vocab_size=self.vocab_size, **config)
            if base in PUBLISHED_MTP:
                add_published_mtp(path, family, vocab_size=self.vocab_size, **config)
            elif base in WITH_MTP:
                add_mtp(path)
        return path

    def ids(self, seed: int, count: int) -> list[int]:
        """Return random ids of tokens that are not special."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, self.vocab_size, (count,), generator=generator).tolist()

    def new_folder(self) -> Path:
        """Return a path at which nothing is, for a disk tier."""
        self._num_folders += 1
        return self._folder / f"disk {self._num_folders}"

    def model(self, options: Options) -> Model:
        """The first rank's."""
        return self.models(options)[0]

    def models(self, options: Options) -> list[Model]:
        """Return the models of all ranks."""
        size, context_size = options.num_ranks, options.context_size
        key = (*replace(options, kernel_block_sizes=()).numbers.items(), options.mtp, size, context_size)
        if key not in self._models:
            table = select_table(options.cpu_ops, options.deterministic, False)
            kept = {name: getattr(options, name) for name in ("kv_cache_dtype", "state_dtype", "mtp")}
            ranks: list[Ranks] = [ALONE]
            if size > 1:
                ranks = [*ThreadRanks.all_of(size, options.deterministic, context_size)]
            folder = self.folder(options.model)
            kept |= {"vision": read_image_settings(folder), "quantization": None}
            if options.model.endswith(":load"):
                kept["quantization"] = "fp8"
            load = partial(load_model, folder, ops=table, dtype="float32", **kept)
            others = [self.threads.submit(load, ranks=each) for each in ranks[1:]]
            self._models[key] = [load(ranks=ranks[0]), *(other.result() for other in others)]
            self.ranks[id(self._models[key][0])] = ranks
        return self._models[key]


@dataclass
class RealEngine:
    """An Engine with its parts at hand. Every step is followed by all checks of the cache."""

    engine: Engine
    core: EngineCore
    sched: Scheduler
    probe: Probe
    layout: CacheLayout
    options: Options
    scrub: bool = True  # memory that is given back is filled with NaN at once
    requests: dict[str, list[Request]] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def add(self, prompt: list[int] | Prompt, params: SamplingParams, priority: int = 0) -> str:
        request_id = self.engine.add_request(self.engine.inputs.prompt(prompt), params, priority=priority)
        names = [sequence_id(request_id, index) for index in range(params.n)]
        self.requests[request_id] = [self.sched._requests[name].request for name in names]
        return request_id

    def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None:
            self.outputs[request_id] = output

    def step(self) -> None:
        for state in self.engine.advance():
            self.outputs[state.request_id] = state.output()
        self.sched.check_integrity()
        if self.scrub:
            self._scrub()

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def ask(self, prompt: list[int] | Prompt, params: SamplingParams, priority: int = 0) -> str:
        request_id = self.add(prompt, params, priority)
        self.run()
        return request_id

    def _scrub(self) -> None:
        arena, layout = self.sched.cache.arena, self.layout
        if arena.moves:
            return  # their contents are still to be moved
        free = [(arena._free_pages, layout.page_bytes)]
        for pool in (arena.blocks, arena.slots, *arena.windows):
            free.append(([u for units in pool.free_units().values() for u in units], pool.stride_bytes))
        for units, stride in free:
            for runner in (self.probe.inner, *self.probe.others) if units else ():
                data = runner.arena.data
                whole = data[: len(data) // stride * stride].view(torch.int64).view(-1, stride // 8)
                whole.index_fill_(0, torch.tensor(units), -1)  # words at once: six times as fast as bytes

    def check_nothing_leaked(self) -> None:
        self.core.drain()
        stats = self.sched.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.cache.num_slots_used == stats.cache.num_checkpoints, "a slot leaked"
        if self.layout.has_kv:
            assert stats.cache.num_blocks_used == stats.cache.num_cached_blocks, "a block leaked"
        self.engine.core.scheduler.reset_prefix_cache()
        left = self.sched.stats().cache
        assert left.num_free_pages == left.num_pages - 1, "pages are lost after a reset"
        assert left.num_free_host_pages == max(0, left.num_host_pages - 1), "pages of the host tier are lost"
        assert left.num_free_disk_pages == max(0, left.num_disk_pages - 1), "pages of the disk tier are lost"
        assert left.disk_failed_reads == left.disk_failed_writes == 0
        for runner in (self.probe.inner, *self.probe.others):
            runner.arena.close()


def _record_all(runner: ModelRunner) -> None:
    runner.record_largest()
    while runner.record_next():
        pass


def start(
    bank: ModelBank,
    options: Options,
    drafter: Drafter | None = None,
    platform: Platform | None = None,
    shapes: Sequence[StepShape] = (),
) -> RealEngine:
    """A fresh engine; its whole arena holds NaN. `options` say how many drafts a drafter may give.

    Graphs of `shapes` are recorded."""
    models = bank.models(options)
    sizes_of_blocks, context_size = options.kernel_block_sizes, options.context_size
    layout = CacheLayout.create(models[0].layer_specs, sizes_of_blocks, MAX_MODEL_LEN, context_size)
    stored = layout.in_tiers()
    num_pages = options.num_pages or layout.num_pages_for(4 * MAX_MODEL_LEN, 64) + 1
    ops = select_table(options.cpu_ops, options.deterministic, options.force_state_copy)
    config = SchedulerConfig(
        max_num_batched_tokens=options.budget,
        max_num_seqs=options.max_num_seqs,
        max_queue_len=options.max_queue_len,
        max_num_encoder_input_tokens=options.encoder_budget,
        encoder_cache_size=options.encoder_cache_size,
    )
    device = platform or CpuPlatform()
    if options.host_streams:
        device = LatePlatform(options.host_tokens, options.host_streams)
    drafts, interval = options.max_num_drafts, options.state_write_interval
    interleave = options.interleave or BLOCK_SIZE // options.context_size
    loaded = [
        Loaded(model, ops, layout, config, device, shapes, drafts, interval, ranks.context, interleave)
        for model, ranks in zip(models, bank.ranks[id(models[0])], strict=True)
    ]
    num_host_pages = 0
    if options.host_tokens:
        num_host_pages = stored.num_pages_for(options.host_tokens, max(2, options.host_tokens // 200)) + 1
    runners = [ModelRunner(each, num_pages, num_host_pages) for each in loaded]
    if shapes:
        others = [bank.threads.submit(_record_all, runner) for runner in runners[1:]]
        _record_all(runners[0])
        for other in others:
            other.result()
    for runner in runners:
        runner.arena.data.fill_(0xFF)  # NaN in every dtype
        runner.arena.host.fill_(0xFF)
        runner.arena.copies.start()
    num_disk_pages, facts = 0, list[DiskFacts | None]()
    if options.disk_tokens:
        num_disk_pages = stored.num_pages_for(options.disk_tokens, max(2, options.disk_tokens // 200)) + 1
        folder = bank.new_folder()
        for rank, runner in enumerate(runners):
            slab, size = slab_layout(runner.arena), len(runners)
            max_bytes = num_disk_pages * slab.page_bytes * size
            store = open_store(folder, slab, max_bytes, b"namespace of all", rank, size)
            assert store is not None
            runner.arena.use_disk(store)
            facts.append(store.facts)
    disk = common_disk(facts) if facts else None
    sched = Scheduler(
        layout,
        num_pages,
        options.cache,
        config,
        deterministic=options.deterministic,
        drafter=drafter,
        clock=lambda: 0.0,
        tiers=TierSizes(num_host_pages, disk, streams=device.has_copy_streams),
        state_write_interval=interval,
    )
    if options.loaded_at_once:
        sched.cache.tiers.restoring.loaded_at_once = options.loaded_at_once
    probe = Probe(runners[0], runners[1:], bank.threads if len(runners) > 1 else None)
    core = EngineCore(sched, probe, async_scheduling=options.async_scheduling)
    eos = frozenset({bank.tokenizer.eos_token_id or 0})
    inputs = InputProcessor(bank.tokenizer, bank.vocab_size, MAX_MODEL_LEN, eos, seed=0)
    return RealEngine(Engine(core, inputs), core, sched, probe, layout, options)

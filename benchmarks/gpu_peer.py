"""Runs the same work in forkpoint or vLLM, under a Python that has it: dummy weights, token ids, `LLM.generate`.

    python -m benchmarks.gpu_peer forkpoint --drafts 3 --json forkpoint.json
    $VLLM_ENV/bin/python -m benchmarks.gpu_peer vllm --config nemotron.json --gib 44 --parts first_token,decode

Sampling is greedy, and clocks are read around the calls. `python -m benchmarks.peer_table` makes a table from the JSON
files of several runs. `docs/benchmarks/gpu_9b.md` has results of both engines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks import machine
from benchmarks.peer_run import Measure, PeerRun

Ids = list[int]
VOCAB_SIZE = 32_000
PARTS = ("first_token", "decode", "forks", "agents", "chat", "prompts", "mixed", "long")
RATES = [0.8, 0.64, 0.512]  # how often the first, second and third draft count
NINE: dict[str, Any] = {
    "dtype": "bfloat16", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 131_072, "tie_word_embeddings": False, "attention_bias": False, "eos_token_id": 0,
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attn_output_gate": True,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
}  # fmt: skip

# matrices that published folders leave in bfloat16
LEFT_OUT = ["lm_head", "mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": LEFT_OUT,
    },
    "int4": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq", "dynamic": {f"-:.*{name}$": {} for name in LEFT_OUT},
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"*{name}" for name in LEFT_OUT]},
}  # fmt: skip


class Engine:
    """Either engine with its own defaults, prefix caching, fp32 states and random weights."""

    def __init__(self, name: str, config: dict[str, Any], num_drafts: int, gib: float, backend: str | None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text(json.dumps(config))
        package: Any = importlib.import_module(name)
        self._params, self._is_vllm = package.SamplingParams, name == "vllm"
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        options["mamba_ssm_cache_dtype"] = "float32"
        if gib:
            options["kv_cache_memory_bytes"] = int(gib * 2**30)
        if num_drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts}
        if self._is_vllm:
            options |= {"enable_prefix_caching": True, "mamba_cache_mode": "align", "max_model_len": 131_072}
            options |= {"max_num_batched_tokens": 16_384, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}
            if backend:  # without FlashInfer's compiler its default cannot be had
                options["gdn_prefill_backend"] = backend
            if num_drafts:
                rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES[:num_drafts]}
                options["speculative_config"] |= rates
        self.llm = package.LLM(self._folder.name, **options)
        if num_drafts and not self._is_vllm:
            self._set_rates(num_drafts)

    def _set_rates(self, num_drafts: int) -> None:
        from benchmarks.gpu_9b import drafts
        from forkpoint.runtime.runner import ModelRunner

        patch.object(ModelRunner, "_accept", drafts.accept_by_chance(RATES[:num_drafts])).start()
        drafts.set_drafter(self.llm, drafts.SyntheticDrafter(tuple(RATES[:num_drafts]), VOCAB_SIZE, {}, True))

    def run(self, prompts: Sequence[Ids], num_tokens: int | Sequence[int]) -> tuple[float, list[Any]]:
        """Return the seconds and the outputs of a call. `num_tokens` is one for all prompts or one for each."""
        given: Any = [{"prompt_token_ids": ids} for ids in prompts] if self._is_vllm else list(prompts)
        silent = {"detokenize": False} if self._is_vllm else {}
        counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        params = [self._params(temperature=0.0, max_tokens=n, ignore_eos=True, **silent) for n in counts]
        began = time.perf_counter()
        outputs = self.llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - began, outputs


class Protocol:
    """The parts that can be chosen. Each returns its measures."""

    def __init__(self, engine: Engine, num_ids: int, batches: Sequence[int], repeats: int, shorter: int) -> None:
        self._engine, self._batches, self._repeats, self._shorter = engine, batches, repeats, shorter
        self._random, self._num_ids = random.Random(0), num_ids

    def _ids(self, count: int) -> Ids:
        return [self._random.randrange(10, self._num_ids - 10) for _ in range(max(1, count // self._shorter))]

    def _hit(self, prompt: Ids, num_tokens: int = 1) -> tuple[float, int]:
        """Return (milliseconds, cached tokens)."""
        seconds, outputs = self._engine.run([prompt], num_tokens)
        return round(seconds * 1e3, 1), outputs[0].num_cached_tokens or 0

    def warm(self) -> list[Measure]:
        prompt = self._ids(16_384)
        self._hit(prompt)
        self._hit(prompt + self._ids(128))
        for batch in self._batches:
            self._engine.run([self._ids(256) for _ in range(batch)], 20)
        return []

    def first_token(self) -> list[Measure]:
        cold, warm = [], []
        for _ in range(self._repeats + 1):
            prompt = self._ids(16_384)
            cold.append(self._hit(prompt))
            warm.append(self._hit(prompt + self._ids(128)))
        return [
            _hits("time to first token, 16,384-token prompt", cold[1:]),
            _hits("the same prompt and 128 new tokens", warm[1:]),
        ]

    def decode(self) -> list[Measure]:
        """Time decoding after new prompts of 256 tokens."""
        found = []
        for batch in self._batches:
            found += self._rates(f"decode, batch {batch}", batch)
        return found

    def _rates(self, name: str, batch: int, prompts: list[Ids] | None = None) -> list[Measure]:
        """Return `batch * 128 / (t(129 tokens) - t(1))`, and the same with `t(257) - t(129)`.

        Each time is that of new prompts, unless cached ones are given."""
        first, later = [], []
        for _ in range(self._repeats):
            new = ([self._ids(256) for _ in range(batch)] for _ in range(3))
            took = [self._engine.run(prompts or next(new), n)[0] for n in (1, 129, 257)]
            first.append(round(batch * 128 / (took[1] - took[0]), 1))
            later.append(round(batch * 128 / (took[2] - took[1]), 1))
        return [
            Measure(name, "tokens/s", median(first), tuple(first)),
            Measure(f"{name}, next 128 tokens", "tokens/s", median(later), tuple(later), is_detail=True),
        ]

    def forks(self) -> list[Measure]:
        prompt, shared = self._ids(20_000), self._ids(3000)
        self._hit(prompt)
        at = len(prompt) * 9 // 20
        forks = [self._hit(prompt[:at] + self._ids(2000)) for _ in range(3)]
        siblings = [self._hit(shared + self._ids(2000)) for _ in range(3)]
        short = self._ids(900)
        self._hit(short)
        return [
            _hits("20,000 tokens, forked at 9,000, first fork", forks[:1], is_detail=True),
            _hits("second and third fork", forks[1:], is_detail=True),
            _hits("3,000 shared and 2,000 own tokens, second request", siblings[1:2], is_detail=True),
            _hits("third request", siblings[2:], is_detail=True),
            _hits("900 tokens, sent again", [self._hit(short)], is_detail=True),
        ]

    def agents(self) -> list[Measure]:
        self._engine.llm.reset_prefix_cache()
        shared = self._ids(2000)
        sent, seconds, num_prompt, num_cached = [shared + self._ids(2000) for _ in range(32)], 0.0, 0, 0
        for _ in range(10):
            took, outputs = self._engine.run(sent, 64)
            seconds += took
            num_prompt += sum(map(len, sent))
            num_cached += sum(output.num_cached_tokens or 0 for output in outputs)
            sent = [
                before + list(output.outputs[0].token_ids) + self._ids(700)
                for before, output in zip(sent, outputs, strict=True)
            ]
        return [
            Measure("agent loop: 32 conversations of 10 turns", "s", round(seconds, 2)),
            Measure("prompt tokens cached in that loop", "%", round(100 * num_cached / num_prompt, 1)),
        ]

    def chat(self) -> list[Measure]:
        turns = []
        for _ in range(3):
            sent = self._ids(2000)
            for _ in range(6):
                turns.append(self._hit(sent))
                _, outputs = self._engine.run([sent], 150)
                sent = sent + list(outputs[0].outputs[0].token_ids) + self._ids(200)
        later = tuple(ms for i, (ms, _) in enumerate(turns) if i >= 6 and i % 6)
        name = "chat turns at 2,000 to 4,000 tokens"
        return [
            Measure(f"{name}, slowest of {len(later)}", "ms", max(later), later),
            Measure(f"{name}, median", "ms", median(later), is_detail=True),
        ]

    def prompts(self) -> list[Measure]:
        """Time the first token of new prompts, after one of each length."""
        found = []
        for length in (1000, 1100, 2000, 3000, 4000, 8000, 24_576):
            hits = [self._hit(self._ids(length)) for _ in range(self._repeats + 1)][1:]
            found.append(_hits(f"time to first token, {length:,}-token prompt", hits))
        return found

    def mixed(self) -> list[Measure]:
        """Time 400 requests at once, whose prompts and answers have all lengths."""
        self._engine.llm.reset_prefix_cache()
        times = []
        for _ in range(2):
            lengths = [(self._random.randint(100, 4000), self._random.randint(16, 300)) for _ in range(400)]
            prompts = [self._ids(length) for length, _ in lengths]
            times.append(round(self._engine.run(prompts, [count for _, count in lengths])[0], 2))
        name = "400 requests with prompts of 100 to 4,000 tokens, answers of 16 to 300"
        return [Measure(name, "s", times[-1], tuple(times))]

    def long(self) -> list[Measure]:
        """Time a prompt of 100,000 tokens, its continuation, and decoding after long prompts."""
        cold, warm, found = [], [], []
        for _ in range(self._repeats):
            prompt = self._ids(100_000)
            cold.append(self._hit(prompt))
            warm.append(self._hit(prompt + self._ids(128)))
        for batch, length in ((1, 100_000), (16, 32_000)):
            prompts = [self._ids(length) for _ in range(batch)]
            self._engine.run(prompts, 1)
            found += self._rates(f"decode, {batch} x {length:,} tokens", batch, prompts)
        return [
            _hits("time to first token, 100,000-token prompt", cold),
            _hits("100,000 tokens and 128 new tokens", warm),
            *found,
        ]


def _hits(name: str, hits: Sequence[tuple[float, int]], is_detail: bool = False) -> Measure:
    """Return the median of (milliseconds, cached tokens)."""
    times = tuple(ms for ms, _ in hits)
    return Measure(name, "ms", median(times), times, tuple(cached for _, cached in hits), is_detail)


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(argv)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts names {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}")
    if importlib.util.find_spec(given.engine) is None:
        parser.error(f"this Python has no package {given.engine}; run the program by one that has it")
    began = time.perf_counter()
    config: dict[str, Any] = json.loads(given.config.read_text()) if given.config else NINE
    if given.quantization:
        config = config | {"quantization_config": QUANTIZATIONS[given.quantization]}
    engine = Engine(given.engine, config, given.drafts, given.gib, given.gdn_prefill_backend)
    measures = [Measure("imports and engine start", "s", round(time.perf_counter() - began, 1))]
    run = PeerRun(
        engine=given.engine,
        versions=_versions(given.engine),
        drafts=given.drafts,
        shorter=given.shorter,
        config=config,
        card=_card(),
        commit=machine.commit_hash(),
        date=machine.today(),
        command=shlex.join(["python", "-m", "benchmarks.gpu_peer", *(sys.argv[1:] if argv is None else argv)]),
        measures=(),
    )
    print(f"{given.engine}: {measures[0].line}", flush=True)
    batches = [int(batch) for batch in given.batches.split(",")]
    protocol = Protocol(engine, min(VOCAB_SIZE, config["vocab_size"]), batches, given.repeats, given.shorter)
    for name in ["warm", *parts]:
        part: Callable[[], list[Measure]] = getattr(protocol, name)
        found = part()
        for measure in found:
            print(measure.line, flush=True)
        measures += found
        if given.json:  # after each part, so that a later failure loses nothing
            run.with_measures(measures).write(given.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("forkpoint", "vllm"))
    parser.add_argument("--config", type=Path, help="a model's config.json (default: the 9B shape)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="the format of the weights (default: bfloat16)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of the MTP layer, which count by set rates")
    parser.add_argument("--gib", type=float, default=0.0, help="GiB of cache (default: what the engine takes)")
    parser.add_argument("--gdn-prefill-backend", help="vLLM's (default: its own choice)")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shorter", type=int, default=1, help="prompts so many times shorter, to try the program")
    parser.add_argument("--json", type=Path, help="write all values, and what was run and where, to this file")
    return parser


def _versions(engine: str) -> dict[str, str]:
    """Return the versions of Python, the engine and the packages that its speed depends on."""
    found = {"python": platform.python_version()}
    for name in (engine, "torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _card() -> str:
    """Return the name of the GPU, or of the CPU if there is none."""
    torch: Any = importlib.import_module("torch")
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else machine.cpu_model()


if __name__ == "__main__":
    main()

"""Measures decode context parallelism on two GPUs of one host: `python -m benchmarks.gpu_cp`.

First a small model decodes on one GPU and on two that keep tokens in turn, and the ids are compared. Then the shape of
Kimi-Linear-48B-A3B, in bfloat16 with dummy weights, runs on two GPUs without and with
`--decode-context-parallel-size 2`: the tokens that fit, and decode rates at three lengths.

Last, one GPU and two compute a prompt of 100,000 tokens of the shape of Qwen3.5-35B-A3B in FP8.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.gpu_9b.measures import Client
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_start import config_of
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

KIMI: Final[dict[str, Any]] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 131_072,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163_840,
}
# The same layers, small enough to compare ids.
SMALL: Final[dict[str, Any]] = {
    **KIMI,
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 64,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "vocab_size": 512,
}
NUM_IDS: Final = 512  # of which prompts are made
LONG_PROMPT: Final = 100_000  # tokens
PARTS: Final = ("ids", "speed", "prompt")
FITS: Final = "tokens that fit"


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows that decode together after prompts of `length` tokens. `asked` is the least ratio of the two rates."""

    rows: int
    length: int
    num_tokens: int
    asked: float

    @property
    def name(self) -> str:
        return f"decode, {self.rows} x {self.length:,} (tokens/s)"


DECODES: Final = (Decode(1, 100_000, 96, 1.3), Decode(32, 16_000, 96, 1.3), Decode(128, 256, 128, 0.95))


def started(config: Mapping[str, Any], folder: Path, device: str, size: int, context_size: int, **more: Any) -> LLM:
    """Start an engine of this config.json on `size` devices, of which `context_size` keep tokens in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parallel = {"tensor_parallel_size": size, "decode_context_parallel_size": context_size}
    began = time.perf_counter()
    llm = LLM(str(folder), **{**engine_options(device, enforce_eager=False), **parallel, **more})
    print(f"{size} devices, context {context_size}: started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm


def same_ids(folder: Path, device: str, lengths: Sequence[int] = (3, 70, 700, 3000), num_tokens: int = 40) -> int:
    """Print and return how many answers of a small model on two devices that keep tokens in turn are those of one."""
    found = []
    for size in (1, 2):
        with started(SMALL, folder, device, size, size, max_num_seqs=8, kv_cache_memory_bytes=1 << 28) as llm:
            client = Client(llm, NUM_IDS)
            prompts = [client.ids(length) for length in lengths]
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            outputs = [output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)]
            found.append([output.outputs[0].token_ids for output in outputs])
    same = sum(bool(one == other) for one, other in zip(*found, strict=True))
    print(f"{same} of {len(found[0])} answers have the ids of one device", flush=True)
    return same


def measure(llm: LLM, decodes: Sequence[Decode], repeats: int) -> dict[str, float]:
    """Return the tokens that fit, and the median rate of each of `decodes`."""
    scheduler, client = llm._engine.core.scheduler, Client(llm, NUM_IDS)
    layout = scheduler.cache.layout
    found: dict[str, float] = {FITS: layout.longest_request(llm.get_metrics()["num_pages"])}
    for each in decodes:
        prompts = [client.ids(each.length) for _ in range(each.rows)]
        client.ask(prompts, 4)  # computes the prompts, which are hits from then on
        rates = []
        for _ in range(repeats):
            answer = client.ask(prompts, each.num_tokens + 1)
            rates.append(each.rows * each.num_tokens / (answer.seconds - answer.last_first_token_s))
        found[each.name] = sorted(rates)[len(rates) // 2]
        print(f"{each.name}: {', '.join(f'{rate:,.1f}' for rate in rates)}", flush=True)
        client.forget()
    return found


def compare(config: Mapping[str, Any], folder: Path, device: str, decodes: Sequence[Decode], repeats: int) -> None:
    """Print the measures without and with context parallelism, and their ratios."""
    both = []
    for context_size in (1, 2):
        with started(config, folder, device, 2, context_size, max_num_seqs=128) as llm:
            both.append(measure(llm, decodes, repeats))
    asked = {FITS: 1.9, **{each.name: each.asked for each in decodes}}
    print("| what | without | with | ratio | asked |\n|---|---|---|---|---|")
    for name, least in asked.items():
        without, with_it = both[0][name], both[1][name]
        print(f"| {name} | {without:,.0f} | {with_it:,.0f} | {with_it / without:.2f} | {least} |", flush=True)


def compare_prompts(config: Mapping[str, Any], folder: Path, device: str, length: int, repeats: int) -> None:
    """Print the times to the first token of a prompt on one device and on two, and their ratio."""
    medians = []
    for size in (1, 2):
        more = {"quantization": "fp8", "language_model_only": True, "max_model_len": length + 64, "max_num_seqs": 8}
        with started(config, folder, device, size, 1, **more) as llm:
            client, times = Client(llm, NUM_IDS), []
            for _ in range(repeats + 1):  # the first one compiles kernels
                times.append(client.ask([client.ids(length)], 1).last_first_token_s)
                client.forget()
        medians.append(sorted(times[1:])[repeats // 2])
        print(f"{size} devices: {', '.join(f'{time_s:.3f}' for time_s in times)} s", flush=True)
    print(f"| prompt of {length:,} tokens (s) | one device | two | ratio | asked |\n|---|---|---|---|---|")
    print(f"| | {medians[0]:.3f} | {medians[1]:.3f} | {medians[1] / medians[0]:.2f} | 0.60 |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cp", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="some of the parts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="of each time")
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"# {machine.commit_hash()}, {machine.today()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if "ids" in args.only:
            same_ids(Path(folder) / "small", args.device)
        if "speed" in args.only:
            compare(KIMI, Path(folder) / "kimi", args.device, DECODES, args.repeats)
        if "prompt" in args.only:
            compare_prompts(config_of("35b"), Path(folder) / "35b", args.device, LONG_PROMPT, args.repeats)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

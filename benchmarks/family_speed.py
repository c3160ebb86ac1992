"""Measures a published shape with dummy weights on one GPU: `python -m benchmarks.family_speed CONFIG.json`.

Prompts, batches and repeats are those of `benchmarks.gpu_9b`. Each time stands next to its floor. The floor of a step
adds up three parts. The first is its matrix products at the measured matrix rate, or their weights at the copy rate,
whichever takes longer. The second is attention's products in the form with fewer operations, or the keys that it reads,
in the same way. The third is its states, read and written. The weights of experts are those that tokens meet if each
chooses at random.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_9b import measures
from benchmarks.gpu_9b.measures import Client, Sizes
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.profile import Profiler
from benchmarks.gpu_ops import ceilings
from benchmarks.machine import commit_hash, today
from forkpoint.cli.model_shape import read_shape
from forkpoint.engine.llm import LLM
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.registry import load_config
from forkpoint.sim.cost import CostModel, Device, StepLoad

NUM_IDS = 32_000  # of which prompts are made; every measured vocabulary has as many
STEP_TOKENS = 8192  # of a prompt, in one step
MAX_SEQS = 128


def prefill_load(start: int, end: int) -> StepLoad:
    """Return the load of a step that computes tokens `[start, end)` of a row."""
    pairs = (end * (end + 1) - start * (start + 1)) / 2
    return StepLoad(prefill_tokens=end - start, prefill_pairs=pairs, num_segments=1, num_sampled=1)


class Floors:
    """Least times of the steps of the model in `folder`, at these rates."""

    def __init__(self, folder: Path, copy: float, product: float) -> None:
        shape, config = read_shape(folder), load_config(folder)
        latent = [part for part in config.parts if isinstance(part, LatentAttentionConfig)]
        expanded = sum(2 * part.num_heads * (part.key_dim + part.shared_dim + part.value_dim) for part in latent)
        if latent:
            shape = replace(shape, flops_per_pair=expanded)
        self._model = CostModel(shape, Device("measured", product, copy, memory_bytes=1.0))
        self._slot_s, self._key_s = shape.layout.slot_bytes / copy, shape.kv_token_bytes / copy

    def step_s(self, load: StepLoad, num_keys: float) -> float:
        """Return the least duration of a step that reads `num_keys` keys."""
        states = 2 * (load.num_segments + load.num_decodes) * self._slot_s
        parts = self._model.parts(load)
        return parts.linear + max(parts.attention, num_keys * self._key_s) + states

    def prompt_s(self, start: int, end: int) -> float:
        steps = [(at, min(at + STEP_TOKENS, end)) for at in range(start, end, STEP_TOKENS)]
        return sum(self.step_s(prefill_load(*step), step[1]) for step in steps)

    def decode_rate(self, sizes: Sizes, batch: int) -> float:
        keys = batch * (sizes.decode_prompt + sizes.decode_tokens / 2)
        return batch / self.step_s(StepLoad(num_decodes=batch, num_sampled=batch), keys)


def measure(client: Client, sizes: Sizes, floors: Floors) -> None:
    """Print the lines of the table."""
    cold, warm = measures.time_to_first_token(client, sizes)
    whole = sizes.prompt + sizes.extension
    floor = 1e3 * floors.prompt_s(0, sizes.prompt)
    took = 1e3 * cold.median
    print(f"| first token of {sizes.prompt:,} | {floor:.1f} ms | {took:.1f} ms | {took / floor:.2f} |", flush=True)
    floor, took = 1e3 * floors.prompt_s(whole - int(warm.num_computed), whole), 1e3 * warm.median
    name = f"of the same and {sizes.extension} more ({warm.num_computed:.0f} computed)"
    print(f"| {name} | {floor:.1f} ms | {took:.1f} ms | {took / floor:.2f} |", flush=True)
    for batch in sizes.decode_batches:
        rate, best = measures.decode_rate(client, sizes, batch).median, floors.decode_rate(sizes, batch)
        cells = f"decode, batch {batch} | {best:,.0f} tok/s | {rate:,.0f} tok/s | {best / rate:.2f}"
        print(f"| {cells} |", flush=True)


def warm_up(client: Client, sizes: Sizes) -> None:
    prompt = client.ids(sizes.prompt)
    client.ask([prompt], 1)
    client.ask([prompt + client.ids(sizes.extension)], 1)
    for batch in sizes.decode_batches:
        client.ask([client.ids(sizes.decode_prompt) for _ in range(batch)], 4)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="the config.json of a model of the hub")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", choices=("fp8",), help="weights in FP8")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="bytes of the arena")
    parser.add_argument("--profile", default="", help="kernels of: cold, warm, or numbers of rows; with commas")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    sizes = replace(Sizes(), repeats=args.repeats)
    copy, product = ceilings()
    torch.cuda.empty_cache()
    versions = f"torch {torch.__version__}, commit {args.commit or commit_hash()}, {today()}"
    print(f"{args.config.stem}: {torch.cuda.get_device_name()}, {versions}")
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, matrix product {product / 1e12:.0f} TFLOP/s", flush=True)
    options: dict[str, Any] = engine_options("auto", enforce_eager=False, quantization=args.quantization)
    options |= {"max_num_seqs": MAX_SEQS, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(args.config, Path(folder) / "config.json")
        floors, began = Floors(Path(folder), copy, product), time.perf_counter()
        with LLM(folder, **options) as llm:
            print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
            client, began = Client(llm, NUM_IDS), time.perf_counter()
            warm_up(client, sizes)
            print(f"warmed up in {time.perf_counter() - began:.1f} s\n", flush=True)
            print("| measure | floor | forkpoint | of the floor's time |\n|---|---|---|---|")
            measure(client, sizes, floors)
            profiler = Profiler(llm, client.ids, sizes)
            for name in filter(None, args.profile.split(",")):
                print("\n".join(profiler.one(name).lines(16)), flush=True)


if __name__ == "__main__":
    main()

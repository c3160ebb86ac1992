"""Compares one model on several devices with one device: `python -m benchmarks.ranks PART`.

`bits` compares ids and log-probabilities of a trained model with --deterministic, or of a shape with dummy weights with
--config. Then it kills a rank under load. `speed` measures the 9B shape, or another, with dummy weights, by the
protocol of `benchmarks.gpu_9b`. `agents` does the same with two drafts of the model's MTP layer, of which a set share
is right, and with conversations that hit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_9b import measures
from benchmarks.gpu_9b.drafts import RATES, SyntheticDrafter, accept_by_chance, set_drafter
from benchmarks.gpu_9b.measures import Client, Sizes
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from benchmarks.peers.protocol import repository_root
from forkpoint.cache.layout import CacheLayout
from forkpoint.engine.llm import LLM
from forkpoint.errors import EngineStoppedError
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.registry import load_config
from forkpoint.params import SamplingParams
from forkpoint.runtime.runner import ModelRunner
from forkpoint.worker.remote import RemoteRunner

SHARED = "The town by the river keeps a catalogue of all its maps, by year and by shelf. " * 30
NUM_PROMPTS = 24
MAX_SEQS = 128
NUM_DRAFTS = 2
SYNTHETIC = "FORKPOINT_BENCH_SYNTHETIC_DRAFTS"  # set: so ranks are told
COPY_RATE = 4.28e12  # bytes read and written a second, of an H200
NUM_IDS = 32_000  # of which prompts are made; every measured vocabulary has as many


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("bits", "speed", "agents"))
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true", help="speed, agents: with it; bits: that part alone")
    parser.add_argument("--model", default=str(repository_root() / "demo_model"), help="bits: a model folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", choices=("fp8",), help="weights in FP8")
    parser.add_argument("--mamba-ssm-cache-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--batches", default="1,32,128", help="speed, agents: rows that decode together, separated by commas"
    )
    parser.add_argument("--config", type=Path, help="the config.json of a shape with dummy weights")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def answers(llm: LLM, dummy: bool) -> list[Any]:
    """Return ids and log-probabilities of prompts that hit, half of them sampled, each run twice. `dummy`: without
    texts."""
    found, client = [], Client(llm, NUM_IDS)
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=48, logprobs=2, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    shared = client.ids(600)
    for turn in range(2):
        texts = [SHARED + f"In turn {turn} " + "and then again " * (5 * i) for i in range(NUM_PROMPTS)]
        ids = [shared + client.ids(20 + 5 * i) for i in range(NUM_PROMPTS)]
        for output in llm.generate(ids if dummy else texts, params, use_tqdm=False):
            (completion,) = output.outputs
            scores = [{k: entry.logprob for k, entry in place.items()} for place in completion.logprobs or ()]
            found.append((list(completion.token_ids), scores))
    return found


def compare_bits(args: argparse.Namespace, folder: Path) -> None:
    """Print whether both results are equal, in how many prompts, and how long a killed rank keeps a request waiting."""
    common: dict[str, Any] = {"device": args.device, "log_level": "warning", "max_num_seqs": 32}
    model, dummy = args.model, args.config is not None
    if dummy:
        model = str(shape_folder(args, folder))
        common |= {"load_format": "dummy", "skip_tokenizer_init": True}
    for deterministic in (True,) if args.deterministic else (True, False):
        options = {**common, "deterministic": deterministic, "quantization": args.quantization}
        with LLM(model, **options) as llm:
            alone = answers(llm, dummy)
        with LLM(model, tensor_parallel_size=args.tensor_parallel_size, **options) as llm:
            several, metrics = answers(llm, dummy), llm.get_metrics()
            same = sum(one[0] == other[0] for one, other in zip(alone, several, strict=True))
            exact = sum(one == other for one, other in zip(alone, several, strict=True))
            print(
                f"{'deterministic' if deterministic else 'default'}: of {len(alone)} answers {same} have the same ids, "
                f"{exact} the same log-probabilities bit for bit; {metrics['hit_tokens']} tokens hit, "
                f"{metrics['num_replayed_steps']} steps were graphs",
                flush=True,
            )
            if not deterministic:
                kill_a_rank(llm, Client(llm, NUM_IDS).ids(600) if dummy else SHARED)


def kill_a_rank(llm: LLM, prompt: str | list[int]) -> None:
    ranks, stream = llm._engine.core._runner, llm.stream(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
    assert isinstance(ranks, RemoteRunner)
    next(stream)
    began = time.perf_counter()
    ranks._ranks[-1].process.kill()
    try:
        list(stream)
    except EngineStoppedError as error:
        print(f"a rank was killed: {time.perf_counter() - began:.2f} s later: {error}", flush=True)


def shape_folder(args: argparse.Namespace, folder: Path) -> Path:
    """Write a folder with only a config.json, which is enough for dummy weights."""
    model = write_config(folder, SHAPE_9B)
    if args.config is not None:
        shutil.copy(args.config, model / "config.json")
    return model


def started(args: argparse.Namespace, folder: Path, **more: Any) -> LLM:
    """Start an engine of the shape with dummy weights."""
    options = {
        **engine_options(args.device, enforce_eager=False, quantization=args.quantization),
        "tensor_parallel_size": args.tensor_parallel_size,
        "deterministic": args.deterministic,
        "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype,
        "max_num_seqs": MAX_SEQS,
        **more,
    }
    began = time.perf_counter()
    llm = LLM(str(shape_folder(args, folder)), **options)
    print(f"{args.tensor_parallel_size} devices, started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm


def chosen_sizes(args: argparse.Namespace) -> Sizes:
    batches = tuple(int(batch) for batch in args.batches.split(","))
    return replace(Sizes(), repeats=args.repeats, decode_batches=batches)


def least_step_s(config: ModelConfig, num_rows: int, num_ranks: int) -> float:
    """Return the least duration of decode rows with drafts: the weights and states of a step, read and written once at
    the copy rate."""
    num_tokens, hidden, num_bytes = num_rows * (1 + NUM_DRAFTS), config.hidden_size, 0.0

    def met(part: PartConfig, tokens: int) -> float:
        if not isinstance(part, MoEConfig):
            return part.num_weights(hidden)
        chosen = part.rule.top_k / part.num_experts
        return part.num_weights(hidden) + part.routed_weights(hidden) * (1 - (1 - chosen) ** tokens - chosen)

    weights = sum(met(part, num_tokens) for part in config.parts)
    weights += NUM_DRAFTS * sum(met(part, num_rows) for part in config.draft_layer)
    num_bytes += weights * (1 if config.quantization else 2)
    num_bytes += 2 * (1 + NUM_DRAFTS) * config.vocab_size * hidden  # the head, in bfloat16
    num_bytes += 2 * num_rows * CacheLayout.create(config.layer_specs).slot_bytes
    return num_bytes / num_ranks / COPY_RATE


def tell_decode_rates(client: Client, sizes: Sizes) -> None:
    for batch in sizes.decode_batches:
        client.ask([client.ids(sizes.decode_prompt) for _ in range(batch)], 4)
    for batch in sizes.decode_batches:
        series = measures.decode_rate(client, sizes, batch)
        print(f"decode, batch {batch}: {series.median:,.0f} tok/s  {_all(series.values)}", flush=True)


def measure_speed(args: argparse.Namespace, folder: Path) -> None:
    """Print a line for each measure."""
    sizes = chosen_sizes(args)
    with started(args, folder) as llm:
        client = Client(llm, NUM_IDS)
        client.ask([client.ids(sizes.prompt)], 1)
        tell_decode_rates(client, sizes)
        cold, _ = measures.time_to_first_token(client, sizes)
        values = [1e3 * value for value in cold.values]
        print(f"first token of {sizes.prompt:,}: {1e3 * cold.median:.1f} ms  {_all(values)}", flush=True)


def measure_agents(args: argparse.Namespace, folder: Path) -> None:
    """Print decode rates, and the times and cached tokens of agent loops."""
    sizes = chosen_sizes(args)
    config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    os.environ[SYNTHETIC] = "1"
    use_synthetic_acceptance()
    with started(args, folder, speculative_config=config) as llm:
        shape = load_config(folder, quantization=args.quantization, mtp=True)
        for batch in sizes.decode_batches:
            rate = batch * (1 + sum(RATES[:NUM_DRAFTS])) / least_step_s(shape, batch, args.tensor_parallel_size)
            print(f"floor of decode, batch {batch}: {rate:,.0f} tok/s", flush=True)
        set_drafter(llm, SyntheticDrafter(RATES[:NUM_DRAFTS], NUM_IDS, {}, by_model=True))
        client = Client(llm, NUM_IDS)
        tell_decode_rates(client, sizes)
        measures.warm_up(client, sizes)
        before = llm.get_metrics()
        for run in measures.agent_loop(client, replace(sizes, repeats=1)):
            print(
                f"agent loop {sizes.conversations} x {sizes.turns}: {run.seconds:.2f} s, "
                f"{100 * run.num_cached / run.num_prompt:.1f} % of prompts cached",
                flush=True,
            )
        drafts, accepted = (
            llm.get_metrics()[f"num_{name}"] - before[f"num_{name}"] for name in ("drafts", "accepted_tokens")
        )
        print(f"{1 + accepted / max(1, drafts):.2f} tokens of a row in a step with drafts", flush=True)


def use_synthetic_acceptance() -> None:
    """Let this process accept drafts at random. All ranks draw the same numbers."""
    torch.manual_seed(0)
    patch.object(ModelRunner, "_accept", accept_by_chance(RATES)).start()


def _all(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:,.1f}" for value in values) + ")"


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    part = {"bits": compare_bits, "speed": measure_speed, "agents": measure_agents}[args.part]
    with tempfile.TemporaryDirectory() as folder:
        part(args, Path(folder) / "model")


if __name__ == "__main__":
    main()
elif SYNTHETIC in os.environ:  # a rank, which imports the program first
    use_synthetic_acceptance()

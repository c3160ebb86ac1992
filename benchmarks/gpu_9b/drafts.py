"""Measures what drafts gain on the 9B shape, or another, on one GPU: `python -m benchmarks.gpu_9b.drafts`.

Dummy weights cannot be guessed, so the acceptance is set. Each draft is accepted with the given
probability, whatever was sampled there, as in vLLM's `synthetic` rejection. All work is done, and only the text is
meaningless.

Ids are compared separately. With `--deterministic`, drafts that are right with those probabilities are compared with
plain decoding in the same run.

Decode rates are medians of batch x 128 over t(257 tokens) - t(129 tokens). With drafts rows end one after the other,
the later the longer answers are. A second rate therefore covers only steps in which all rows run and are beyond their
128th tokens. If a probability is 0, the engine chooses the number of drafts. Small batches are repeated several times
as often, because their rates depend on chance.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_9b.measures import Ids
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from forkpoint.cache.lease import Lease
from forkpoint.engine.llm import LLM
from forkpoint.ops.rows.columns import SpanColumns
from forkpoint.params import SamplingParams
from forkpoint.runtime.draft_spans import NO_DRAFT, DraftSpans
from forkpoint.runtime.records import records_bytes
from forkpoint.runtime.runner import ModelRunner
from forkpoint.runtime.sampler import Sampled
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, IntArray, StepResult
from forkpoint.sched.request import Request, RequestUpdate

RATES = (0.8, 0.64, 0.512)  # of drafts 1, 2 and 3 being right
PROMPT, TOKENS, REPEATS = 256, 128, 3
LONG = 16_384  # tokens of a prompt whose first token is timed
NUM_IDS = 32_000  # of which prompts are made; every vocabulary has as many
SMALL, MOST_TIMES = 32, 4  # rows below which a batch is asked more often, up to so many times
COMPARED = 8  # rows whose ids are compared
MIB = 1 << 20
Accept: TypeAlias = Callable[[ModelRunner, DraftSpans, IntArray, Sampled], tuple[Tensor, SpanColumns]]


class SyntheticDrafter(Drafter):
    """Drafts of which the first, the first two, and so on are right with the given probabilities.

    This holds for prompts whose answers are known. For others it drafts meaningless ids, or `TO_DRAFT`.
    """

    def __init__(
        self, rates: Sequence[float], vocab_size: int, known: Mapping[Any, Sequence[int]], by_model: bool = False
    ) -> None:
        self._rates, self._vocab_size, self._known, self._by_model = rates, vocab_size, known, by_model
        self._random = np.random.default_rng(0)

    def draft(self, request: Request, lease: Lease, most: int) -> IntArray | None:
        count, first = min(most, len(self._rates)), len(request.output_token_ids)
        answer = self._known.get(tuple(request.prompt_token_ids.tolist()))
        is_ahead = lease.num_planned >= request.num_tokens
        if answer is None or is_ahead:
            return np.full(count, TO_DRAFT if self._by_model or is_ahead else 7, np.int32)
        right = np.asarray(answer[first:][:count], np.int32)
        wrong = self._random.random() >= np.asarray(self._rates[: len(right)])
        return np.where(wrong, (right + 1) % self._vocab_size, right).astype(np.int32)

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return self._by_model


def accept_by_chance(rates: Sequence[float]) -> Accept:
    """Return a method in place of `ModelRunner._accept` that accepts drafts at random, whatever was sampled."""

    def accept(self: ModelRunner, spans: DraftSpans, rows: IntArray, sampled: Sampled) -> tuple[Tensor, SpanColumns]:
        chances, ids = np.zeros(int(spans.sizes.max())), sampled.token_ids
        chances[: len(rates)] = rates[: len(chances)]
        draws, number = torch.rand(len(spans.sizes)).numpy(), spans.spread(np.zeros_like(spans.sizes))
        right = (np.repeat(draws, spans.sizes) < chances[number]) & (spans.drafts != NO_DRAFT)
        there, columns = torch.from_numpy(right).to(ids.device, non_blocking=True), self._span_columns(spans, rows)
        guessed = columns._replace(drafts=torch.where(there, ids, NO_DRAFT), draft_at=None)
        return self._ops.accept(ids, sampled.finite, guessed), columns

    return accept


def set_drafter(llm: LLM, drafter: Drafter) -> None:
    """Install this drafter instead of the one that the options name."""
    drafting = llm._engine.core.scheduler._drafting
    assert drafting is not None, "the options name no drafter"
    drafting._drafter = drafter


@dataclass(frozen=True, slots=True)
class Rate:
    """Decode rates of a batch in tokens per second, and the mean tokens of a row in a step.

    One rate covers whole answers. The other covers only the steps in which all rows run and are beyond their 128th
    tokens.
    """

    tokens_per_s: float
    full_per_s: float
    tokens_a_step: float


def ids(rng: np.random.Generator, count: int, length: int = PROMPT) -> list[Ids]:
    found: list[Ids] = rng.integers(1, NUM_IDS, (count, length)).tolist()
    return found


def ask(llm: LLM, prompts: list[Ids], max_tokens: int) -> tuple[float, list[Ids]]:
    """Return (seconds, ids of the answers)."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


@contextmanager
def step_times(llm: LLM) -> Iterator[list[tuple[float, int, int]]]:
    """Record (time of arrival, rows, tokens) of each step's result while the context is open."""
    scheduler, found = llm._engine.core.scheduler, list[tuple[float, int, int]]()
    apply = scheduler.apply

    def noted(result: StepResult) -> list[RequestUpdate]:
        num_tokens = len(result.token_ids)
        found.append((time.perf_counter(), num_tokens if result.counts is None else len(result.counts), num_tokens))
        return apply(result)

    vars(scheduler)["apply"] = noted
    try:
        yield found
    finally:
        del vars(scheduler)["apply"]


def decode_rate(llm: LLM, batch: int, repeats: int) -> Rate:
    rng, rates, full_rates = np.random.default_rng(batch), [], []
    ask(llm, ids(rng, batch), 9)  # to warm up
    before = llm.get_metrics()
    torch.manual_seed(batch)  # so that two commits have the same luck
    for _ in range(repeats * max(1, min(MOST_TIMES, SMALL // batch))):
        short = ask(llm, ids(rng, batch), TOKENS + 1)[0]
        with step_times(llm) as steps:
            long = ask(llm, ids(rng, batch), 2 * TOKENS + 1)[0]
        rates.append(batch * TOKENS / (long - short))
        told = list(itertools.accumulate(tokens for *_, tokens in steps))
        first, *_, last = (i for i, (_, rows, _) in enumerate(steps) if rows == batch and told[i] >= batch * TOKENS)
        full_rates.append((told[last] - told[first]) / (steps[last][0] - steps[first][0]))
    after = llm.get_metrics()
    drafts, accepted = (after[name] - before[name] for name in ("num_drafts", "num_accepted_tokens"))
    return Rate(float(np.median(rates)), float(np.median(full_rates)), 1 + accepted / max(1, drafts))


def first_token_s(llm: LLM, repeats: int) -> float:
    """Measure the time to the first token of a long new prompt."""
    rng = np.random.default_rng(0)
    return float(np.median([ask(llm, ids(rng, 1, LONG), 1)[0] for _ in range(repeats + 1)][1:]))


def start(model: Path, args: argparse.Namespace, **options: Any) -> LLM:
    began = time.perf_counter()
    common = engine_options(args.device, args.enforce_eager, quantization=args.quantization)
    limits = {"max_num_seqs": max(args.batches), "max_model_len": LONG + PROMPT}
    llm = LLM(str(model), **{**common, **limits, **options})
    print(f"# engine {options} started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm


def measure(model: Path, args: argparse.Namespace) -> None:
    with start(model, args) as llm:
        plain = {batch: decode_rate(llm, batch, args.repeats) for batch in args.batches}
        plain_s = first_token_s(llm, args.repeats)
    most = args.num_drafts
    config = {"method": args.method, "num_speculative_tokens": most}
    with start(model, args, speculative_config=config) as llm:
        core = llm._engine.core.scheduler
        assert core._drafting is not None
        runner: Any = llm._engine.core._runner
        extra, own = records_bytes(core.layout, 1, 1 + most, runner._records.interval), core._drafting._drafter
        print(f"extra memory of a row, {most} drafts: {extra / MIB:.2f} MiB", flush=True)
        seconds = first_token_s(llm, args.repeats)
        print(f"first token of {LONG:,}: {seconds * 1e3:.1f} ms, plain {plain_s * 1e3:.1f}", flush=True)

        def told(name: str, batch: int) -> None:
            rate, own = decode_rate(llm, batch, args.repeats), plain[batch]
            print(
                f"{name}, batch {batch:4}: {rate.tokens_per_s:9.1f} tokens/s, plain {own.tokens_per_s:9.1f}, "
                f"{rate.tokens_per_s / own.tokens_per_s:6.3f}x; with all rows {rate.full_per_s:9.1f}, "
                f"{rate.full_per_s / own.full_per_s:6.3f}x; {rate.tokens_a_step:.2f} tokens of a row with drafts",
                flush=True,
            )

        with patch.object(ModelRunner, "_accept", accept_by_chance(RATES)):
            for count in range(1, most + 1):
                set_drafter(llm, SyntheticDrafter(RATES[:count], NUM_IDS, {}, args.method == "mtp"))
                for batch in args.batches:
                    told(f"{count} drafts", batch)
        with patch.object(ModelRunner, "_accept", accept_by_chance(())):
            set_drafter(llm, own)
            for batch in args.batches:
                told("none right", batch)


def compare(model: Path, args: argparse.Namespace) -> None:
    """Compare ids with drafts to those of plain decoding. Raises SystemExit if any differs."""
    prompts = ids(np.random.default_rng(1), COMPARED)
    small = {"deterministic": True, "max_num_seqs": COMPARED, "kv_cache_memory_bytes": 6 << 30}
    with start(model, args, **small) as llm:
        plain_s, want = ask(llm, prompts, TOKENS)
    config = {"method": "ngram", "num_speculative_tokens": args.num_drafts}
    with start(model, args, **small, speculative_config=config) as llm:
        known = {tuple(prompt): answer for prompt, answer in zip(prompts, want, strict=True)}
        set_drafter(llm, SyntheticDrafter(RATES[: args.num_drafts], NUM_IDS, known))
        seconds, found = ask(llm, prompts, TOKENS)
        metrics = llm.get_metrics()
    same = sum(mine == other for mine, other in zip(found, want, strict=True))
    accepted, drafted, steps = (metrics[f"num_{name}"] for name in ("accepted_tokens", "draft_tokens", "steps"))
    print(
        f"deterministic: {same} of {len(want)} answers of {TOKENS} ids are those of plain decoding; {accepted} of "
        f"{drafted} drafts accepted; {metrics['num_replayed_steps']} of {steps} steps replayed; {seconds:.2f} s, plain "
        f"{plain_s:.2f} s",
        flush=True,
    )
    if same < len(want):
        raise SystemExit("error: ids with drafts are not those of plain decoding, so no rates are measured")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_9b.drafts", description=(__doc__ or "").strip())
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--num-drafts", type=int, default=len(RATES), choices=range(1, len(RATES) + 1))
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram", help="mtp: the model makes the drafts")
    parser.add_argument("--config", type=Path, help="config.json of another shape")
    parser.add_argument("--quantization", help="of the engine's options")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--only", choices=("rates", "ids"), help="one of both")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = Path(folder) / "model"
        if args.config is None:
            write_config(model, SHAPE_9B)
        else:
            model.mkdir()
            shutil.copy(args.config, model / "config.json")
        if args.only != "rates":
            compare(model, args)
        if args.only != "ids":
            measure(model, args)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.speculation`: compares long greedy answers with drafts to those without, in turns, with their
ids."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from benchmarks.latency import check_succeeded
from forkpoint.checks import option
from forkpoint.cli.main import run
from forkpoint.cli.model import with_model
from forkpoint.cli.options import Parser, add_engine_options, add_option_group, engine_options, option_values
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, UnsupportedModelError
from forkpoint.params import SamplingParams

METHODS = (None, "ngram", "suffix", "cache", "mtp")
# The second time a question is asked, the tree has its answer; in other words, past outputs have some of it.
TIMES = {"new": "{}", "again": "{}", "alike": "Please: {}"}
QUESTIONS = (
    "Count from one to sixty in words.",
    "Tell me about yourself, at length.",
    "List everything that you can do.",
    "Write a long story about a heron and a toad.",
)
MOST_MARGIN = 0.01  # of log-probabilities of two ids that rounding may swap


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """The questions, asked one after the other. Raises ConfigError for values out of range."""

    num_speculative_tokens: int = option(3, "most drafts of a step")
    output_len: int = option(400, "tokens of each answer")
    num_rounds: int = option(3, "rounds measured, after one that warms up; the best of each counts")

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "output_len", "num_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not allowed; give an integer of 1 or more")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of all questions: seconds by wall-clock and CPU, steps, and the ids of answers and prompts."""

    clock_s: float
    cpu_s: float
    num_steps: int
    answers: tuple[list[int], ...]
    prompts: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The best times of one method, next to those without drafts, and how many of all its answers had the same ids."""

    method: str
    time: str
    clock_s: float
    cpu_s: float
    clock_ratio: float
    cpu_ratio: float
    tokens_a_step: float
    num_same: int
    num_answers: int

    def line(self) -> str:
        return (
            f"{self.method:<8} {self.time:<6} {self.clock_s:8.2f} s {self.clock_ratio:6.2f}x {self.cpu_s:8.2f} s "
            f"{self.cpu_ratio:6.2f}x {self.tokens_a_step:10.2f} {self.num_same:6} of {self.num_answers}"
        )


TITLES = f"{'drafts':<8} {'asked':<6} {'clock':>10} {'':>7} {'process':>10} {'':>7} {'a step':>10} {'same ids':>11}"


def ask(llm: LLM, params: SamplingParams, form: str) -> Sample:
    """Ask the questions. Raises RequestFailedError if a completion fails."""
    before, clock_s, cpu_s = llm.get_metrics()["num_steps"], time.perf_counter(), time.process_time()
    outputs = [
        llm.chat([{"role": "user", "content": form.format(text)}], params, use_tqdm=False)[0] for text in QUESTIONS
    ]
    clock_s, cpu_s = time.perf_counter() - clock_s, time.process_time() - cpu_s
    check_succeeded(outputs)
    num_steps = llm.get_metrics()["num_steps"] - before
    answers, prompts = zip(*((output.outputs[0].token_ids, output.prompt_token_ids) for output in outputs), strict=True)
    return Sample(clock_s, cpu_s, num_steps, answers, prompts)


def compare(samples: Mapping[tuple[str | None, str], list[Sample]]) -> Iterator[Row]:
    """Yield a row for each method and way of asking. The samples of one round are compared with each other."""
    for (method, when), found in samples.items():
        plain = samples[None, when]
        clock_s, cpu_s = min(sample.clock_s for sample in found), min(sample.cpu_s for sample in found)
        pairs = [
            pair
            for mine, other in zip(found, plain, strict=True)
            for pair in zip(mine.answers, other.answers, strict=True)
        ]
        num_tokens = sum(len(answer) for sample in found for answer in sample.answers)
        yield Row(
            method or "none",
            when,
            clock_s,
            cpu_s,
            min(sample.clock_s for sample in plain) / clock_s,
            min(sample.cpu_s for sample in plain) / cpu_s,
            num_tokens / sum(sample.num_steps for sample in found),
            sum(mine == other for mine, other in pairs),
            len(pairs),
        )


def margin(llm: LLM, prompt: list[int], mine: list[int], other: list[int]) -> float:
    """Return the difference of the log-probabilities of the first ids that differ; infinity if they are not the two
    likeliest."""
    at = next(i for i, (own, theirs) in enumerate(zip(mine, other, strict=True)) if own != theirs)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)
    (output,) = llm.generate([{"prompt_token_ids": [*prompt, *other[:at]]}], params, use_tqdm=False)
    (told,) = output.outputs[0].logprobs or ({},)
    pair = [told[id_].logprob for id_ in (mine[at], other[at]) if id_ in told]
    return abs(pair[0] - pair[1]) if len(pair) == 2 else math.inf


def measure(options: SpeculationOptions, engine: dict[str, Any], show_progress: bool) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for each answer whose difference no rounding explains.

    `engine` are options of `LLM`. Every round has its own salt, so that its new text is not cached.
    """
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    with ExitStack() as stack:
        llms = {}
        for method in METHODS:
            config = {"method": method, "num_speculative_tokens": options.num_speculative_tokens} if method else None
            try:
                llms[method] = stack.enter_context(LLM(**{**engine, "speculative_config": config}))
            except UnsupportedModelError:
                if method != "mtp":  # which not every model has
                    raise
        samples: dict[tuple[str | None, str], list[Sample]] = {(m, when): [] for when in TIMES for m in llms}
        for number in tqdm(range(options.num_rounds + 1), desc="Rounds", disable=not show_progress):
            salted = replace(params, cache_salt=f"round {number}")
            for when, form in TIMES.items():
                for method, llm in llms.items():
                    sample = ask(llm, salted, form)
                    if number:
                        samples[method, when].append(sample)
        wrong = []
        most = 0.0 if engine.get("deterministic") else MOST_MARGIN
        for (method, when), found in samples.items():
            for mine, other in zip(found, samples[None, when], strict=True):
                for *pair, prompt in zip(mine.answers, other.answers, mine.prompts, strict=True):
                    if pair[0] != pair[1] and (gap := margin(llms[None], prompt, *pair)) >= most:
                        wrong.append(f"{method}, {when}: ids part from plain decoding's, {gap:.4f} nats apart")
    return list(compare(samples)), wrong


def build_parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.speculation", description="What drafts bring.")
    add_option_group(parser, "benchmark options", SpeculationOptions)
    add_engine_options(parser)
    parser.set_defaults(command=_speculation)
    return parser


def _speculation(arguments: argparse.Namespace) -> int:
    options = SpeculationOptions(**option_values(arguments, SpeculationOptions))
    rows, wrong = measure(options, with_model(engine_options(arguments)), sys.stderr.isatty())
    print(TITLES, *(row.line() for row in rows), sep="\n", flush=True)
    if wrong:
        print("error: these times mean nothing:", *wrong, sep="\n  ", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    run(build_parser)

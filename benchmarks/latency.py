"""`python -m benchmarks.latency`: how long one batch takes from submission to its last token."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.offline_options import LatencyOptions
from benchmarks.step_profile import profile_call
from forkpoint.cli.main import run
from forkpoint.cli.model import with_model
from forkpoint.cli.options import Parser, add_engine_options, add_option_group, engine_options, option_values
from forkpoint.cli.result_file import ResultFile
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, RequestFailedError
from forkpoint.models.registry import load_config
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
MAX_ID = 10_000  # prompts are made of smaller ids, as vLLM's are


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Seconds of each batch."""

    latencies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.latencies))

    @property
    def percentiles(self) -> dict[int, float]:
        return {rank: float(np.percentile(self.latencies, rank)) for rank in PERCENTILES}

    def lines(self) -> Iterator[str]:
        """Yield vLLM's lines."""
        yield f"Avg latency: {self.mean} seconds"
        for rank, seconds in self.percentiles.items():
            yield f"{rank}% percentile latency: {seconds} seconds"

    def to_json(self) -> dict[str, Any]:
        """Return the results under vLLM's names."""
        percentiles = {str(rank): seconds for rank, seconds in self.percentiles.items()}
        return {"avg_latency": self.mean, "latencies": list(self.latencies), "percentiles": percentiles}


def run_latency(options: LatencyOptions, engine: dict[str, Any], show_progress: bool) -> Iterator[str]:
    """Measure, write the file if one was given, and yield the lines to print.

    `engine` are options of `LLM`. Prefix caching is off unless they turn it on, as in vLLM, because every batch has the
    same prompts. Raises ConfigError before anything runs, and RequestFailedError if a completion fails.
    """
    file = ResultFile(options.output_json)
    config = load_config(engine["model"], max_model_len=engine.get("max_model_len"))
    if options.input_len + options.output_len > config.max_model_len:
        raise ConfigError(
            f"input_len={options.input_len} and output_len={options.output_len} together exceed "
            f"max_model_len={config.max_model_len}"
        )
    random = np.random.default_rng(engine.get("seed", 0))
    shape = (options.batch_size, options.input_len)
    prompts = random.integers(0, min(MAX_ID, config.vocab_size), shape).tolist()
    params = SamplingParams(n=options.n, temperature=1.0, max_tokens=options.output_len, ignore_eos=True)
    given = {"enable_prefix_caching": False, **engine}
    if options.disable_detokenize:
        given["skip_tokenizer_init"] = True
    with LLM(**given) as llm:
        for _ in _counted(options.num_iters_warmup, "Warmup iterations", show_progress):
            _ask(llm, prompts, params)
        if options.profile:
            yield from profile_call(llm, "one batch", lambda: _ask(llm, prompts, params))
            return
        rounds = _counted(options.num_iters, "Bench iterations", show_progress)
        result = LatencyResult(tuple(_ask(llm, prompts, params) for _ in rounds))
    file.write(result.to_json())
    yield from result.lines()


def _ask(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    check_succeeded(outputs)
    return seconds


def check_succeeded(outputs: list[RequestOutput]) -> None:
    """Raise RequestFailedError with the first completion that failed."""
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None:
                raise RequestFailedError(f"{output.request_id}: {completion.error}")


def _counted(count: int, title: str, show: bool) -> Iterator[int]:
    yield from tqdm(range(count), desc=title, disable=not show)


def build_parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.latency", description="How long one batch takes.")
    add_option_group(parser, "benchmark options", LatencyOptions)
    add_engine_options(parser)
    parser.set_defaults(command=_latency)
    return parser


def _latency(arguments: argparse.Namespace) -> int:
    options = LatencyOptions(**option_values(arguments, LatencyOptions))
    for line in run_latency(options, with_model(engine_options(arguments)), sys.stderr.isatty()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run(build_parser)

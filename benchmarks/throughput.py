"""`python -m benchmarks.throughput`: requests and tokens per second when all prompts arrive at once."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.latency import check_succeeded
from benchmarks.offline_options import ThroughputOptions
from forkpoint.bench.datasets import sharegpt_requests, synthetic
from forkpoint.bench.options import DatasetOptions
from forkpoint.bench.request import BenchRequest, checked
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.cli.main import run
from forkpoint.cli.model import with_model
from forkpoint.cli.options import Parser, add_engine_options, add_option_group, engine_options, option_values
from forkpoint.cli.result_file import ResultFile
from forkpoint.engine.llm import LLM
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ConfigError
from forkpoint.models.registry import load_config
from forkpoint.params import SamplingParams

DATASETS = ("random", "sharegpt", "prefix_repetition")


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Counts of what was done in `elapsed_s` seconds."""

    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def lines(self) -> Iterator[str]:
        """Yield vLLM's lines and those of the cache."""
        yield (
            f"Throughput: {self.num_requests / self.elapsed_s:.2f} requests/s, "
            f"{self.num_tokens / self.elapsed_s:.2f} total tokens/s, "
            f"{self.num_output_tokens / self.elapsed_s:.2f} output tokens/s"
        )
        yield f"Total num prompt tokens:  {self.num_prompt_tokens}"
        yield f"Total num output tokens:  {self.num_output_tokens}"
        share = self.num_cached_tokens / max(1, self.num_prompt_tokens)
        yield f"Total num cached tokens:  {self.num_cached_tokens} ({share:.1%} of the prompts)"

    def to_json(self) -> dict[str, Any]:
        """Return the results under vLLM's names, and the cached tokens."""
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": self.num_tokens / self.elapsed_s,
            "num_cached_tokens": self.num_cached_tokens,
        }


class TokenRange(Vocabulary):
    """The ids of a model without a tokenizer. Prompts can be made of them, texts cannot."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = np.arange(1, vocab_size, dtype=np.int32)


def run_throughput(
    options: ThroughputOptions, dataset: DatasetOptions, engine: dict[str, Any], show_progress: bool
) -> Iterator[str]:
    """Measure, write the file if one was given, and yield the lines to print.

    `engine` are options of `LLM`. Raises ConfigError for a dataset that needs a server and for a file that cannot be
    written, and RequestFailedError if a completion fails.
    """
    file = ResultFile(options.output_json)
    requests = draw_requests(options, dataset, engine)
    prompts: list[Any] = [request.content for request in requests]
    params = [
        SamplingParams(n=options.n, temperature=1.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        for request in requests
    ]
    without_texts = options.disable_detokenize and not any(isinstance(prompt, str) for prompt in prompts)
    with LLM(**{**engine, **({"skip_tokenizer_init": True} if without_texts else {})}) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
        elapsed = time.perf_counter() - start
    check_succeeded(outputs)
    result = ThroughputResult(
        elapsed_s=elapsed,
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )
    file.write(result.to_json())
    yield from result.lines()


def draw_requests(options: ThroughputOptions, dataset: DatasetOptions, engine: dict[str, Any]) -> list[BenchRequest]:
    """Return the requests of a dataset, with the lengths in `options` instead of the dataset's own."""
    if dataset.dataset_name not in DATASETS:
        raise ConfigError(
            f"dataset_name={dataset.dataset_name!r} orders its requests in time and needs a server (`bench serve`); "
            f"here choose one of {', '.join(DATASETS)}"
        )
    if options.input_len is not None:
        dataset = replace(dataset, random_input_len=options.input_len)
    if options.prefix_len is not None:
        dataset = replace(dataset, random_prefix_len=options.prefix_len)
    if options.output_len is not None:
        dataset = replace(
            dataset,
            random_output_len=options.output_len,
            sharegpt_output_len=options.output_len,
            prefix_repetition_output_len=options.output_len,
        )
    seed = engine.get("seed", 0)
    if dataset.dataset_name == "sharegpt":
        tokenizer = Tokenizer.load(engine.get("tokenizer") or engine["model"])
        return checked(sharegpt_requests(dataset, Vocabulary(tokenizer), options.num_prompts, seed))
    vocabulary = TokenRange(load_config(engine["model"]).vocab_size)
    return checked(synthetic(dataset, vocabulary, options.num_prompts, seed))


def build_parser() -> Parser:
    text = "How many requests and tokens a second, all prompts at once."
    parser = Parser(prog="python -m benchmarks.throughput", description=text)
    add_option_group(parser, "benchmark options", ThroughputOptions)
    add_option_group(parser, "dataset options", DatasetOptions)
    add_engine_options(parser)
    parser.set_defaults(command=_throughput)
    return parser


def _throughput(arguments: argparse.Namespace) -> int:
    options = ThroughputOptions(**option_values(arguments, ThroughputOptions))
    dataset = DatasetOptions(**option_values(arguments, DatasetOptions))
    for line in run_throughput(options, dataset, with_model(engine_options(arguments)), sys.stderr.isatty()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run(build_parser)

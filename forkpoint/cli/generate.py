"""`forkpoint generate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forkpoint.cli.model import announce, with_model
from forkpoint.cli.options import engine_options, sampling_params
from forkpoint.cli.stats import cache_line
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.outputs import RequestOutput
from forkpoint.params import FinishReason, SamplingParams

if TYPE_CHECKING:
    from forkpoint.engine.llm import LLM


def generate(options: argparse.Namespace) -> int:
    """Print completions on standard output and cache statistics on standard error. Return 1 if one failed, otherwise 0.

    Raises ConfigError for `--stream` with several completions, and KeyboardInterrupt after Ctrl-C once all is printed.
    """
    prompts = options.prompt or [standard_input()]
    if options.stream and (len(prompts) > 1 or options.n > 1):
        raise ConfigError("--stream prints one completion; give one prompt and leave --n at 1")
    engine = with_model(engine_options(options))
    config = EngineConfig.from_flat(**engine)
    params = sampling_params(options, config, n=options.n)
    announce(config.model, config.log_level)
    from forkpoint.engine.llm import LLM

    with LLM(**engine) as llm:
        if options.stream:
            outputs = [stream(llm, prompts[0], params, lambda text: print(text, end="", flush=True))]
            print()
        else:
            outputs = llm.generate(prompts, params, use_tqdm=len(prompts) > 1 and sys.stderr.isatty())
            _print(outputs)
    for output in outputs:
        print(cache_line(output), file=sys.stderr)
    ends = {completion.finish_reason for output in outputs for completion in output.outputs}
    if ends & {FinishReason.ABORT, None}:
        raise KeyboardInterrupt  # it ended the stream early
    return int(sum(_report_failures(output) for output in outputs) > 0)


def standard_input() -> str:
    """Read all of standard input. Raises ConfigError if it is a terminal."""
    if sys.stdin.isatty():
        raise ConfigError("no prompt; give --prompt TEXT, or pipe it into standard input")
    return sys.stdin.read()


def stream(llm: LLM, prompt: Any, params: SamplingParams, show: Callable[[str], None]) -> RequestOutput:
    """Call `show` with each piece of the output's text as it comes, and return the whole output.

    After Ctrl-C it is the output so far; without any, KeyboardInterrupt is raised.
    """
    shown = 0
    last: RequestOutput | None = None
    try:
        for last in llm.stream(prompt, params):
            text = last.outputs[0].text
            show(text[shown:])
            shown = len(text)
    except KeyboardInterrupt:  # outside of a step, for example while a piece is shown
        if last is None:
            raise
    assert last is not None
    return last


def _print(outputs: list[RequestOutput]) -> None:
    plain = len(outputs) == 1 and len(outputs[0].outputs) == 1
    for number, output in enumerate(outputs):
        for completion in output.outputs:
            if not plain:
                print(f"--- prompt {number}, completion {completion.index}")
            print(completion.text)


def _report_failures(output: RequestOutput) -> bool:
    failed = [c for c in output.outputs if c.finish_reason is FinishReason.ERROR]
    for completion in failed:
        print(f"error: {output.request_id}, completion {completion.index}: {completion.error}", file=sys.stderr)
    return bool(failed)

"""Models of running servers, for `forkpoint complete` and `forkpoint chat --url`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from forkpoint.cli.generate import standard_input
from forkpoint.cli.options import option_values
from forkpoint.cli.stats import answer_line
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta
from forkpoint.client.server import COMPLETIONS, Server
from forkpoint.errors import ServerError
from forkpoint.params import SamplingParams

Show: TypeAlias = Callable[[Delta], None]
# Posts a body to a path, fills the answer and shows each delta. Raises ServerError; KeyboardInterrupt after Ctrl-C.
Ask: TypeAlias = Callable[[str, Mapping[str, Any], Answer, Show], None]


@contextmanager
def connection(options: argparse.Namespace) -> Iterator[Ask]:
    """Connect to the given server and model, for use from one thread. Raises ServerError or ConfigError.

    Given sampling options are sent with every request.
    """
    fields = option_values(options, SamplingParams)

    async def stream(path: str, body: Mapping[str, Any], answer: Answer, show: Show) -> None:
        whole = {"model": model.id, **body, **fields}
        async for delta in answer.read(server.stream(path, whole, running_usage=True)):
            show(delta)

    def ask(path: str, body: Mapping[str, Any], answer: Answer, show: Show) -> None:
        runner.run(stream(path, body, answer, show))

    server = Server(options.url, api_key=options.api_key)
    with asyncio.Runner() as runner:
        runner.run(server.__aenter__())
        try:
            model = runner.run(server.model(options.model_name))
            yield ask
        finally:
            runner.run(server.__aexit__())


def complete(options: argparse.Namespace) -> int:
    """Print completions on standard output as they come, cache statistics and errors on standard error.

    Return 1 if a completion failed, otherwise 0. Raises what `connection` raises.
    """
    failed = False
    prompts: Sequence[str] = options.prompt or [standard_input()]
    with connection(options) as ask:
        for prompt in prompts:
            answer = Answer()
            try:
                ask(COMPLETIONS, {"prompt": prompt}, answer, lambda delta: print(delta.text, end="", flush=True))
            except ServerError as error:
                failed = True
                print(f"error: {error}", file=sys.stderr)
                continue
            finally:
                print()
            print(answer_line(answer), file=sys.stderr)
    return int(failed)

"""`forkpoint run-batch`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from forkpoint.cli.main import INTERRUPTED
from forkpoint.cli.model import require_no_engine_options, with_model
from forkpoint.cli.options import engine_options, option_values
from forkpoint.cli.vllm_flags import notice_lines
from forkpoint.client.batch import BatchAnswer, BatchOutput, BatchRequest, read_batch, run_batch
from forkpoint.client.server import Server
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import LOGGER, set_up_logging
from forkpoint.server.config import OF_BATCHES, ServerConfig
from forkpoint.server.run import opened


def run_batch_command(options: argparse.Namespace) -> int:
    """Answer the requests that have no final answer yet, on a server given by URL or one started here.

    Return 1 if a request failed, 130 if some are still open after Ctrl-C, otherwise 0. Raises ConfigError for wrong
    files and options, and what `local_server` raises.
    """
    if options.max_concurrency < 1:
        raise ConfigError(f"max_concurrency={options.max_concurrency} must be 1 or more")
    engine = engine_options(options)
    answers = {name: value for name, value in option_values(options, ServerConfig).items() if name in OF_BATCHES}
    if options.url is not None:
        require_no_engine_options({**engine, **answers})
    requests = read_batch(options.input_file)
    output = BatchOutput(options.output_file, requests)
    todo = [request for request in requests if request.custom_id not in output.done]
    tally = Tally(output, num_requests=len(requests), num_before=len(requests) - len(todo))
    try:
        if todo:
            if options.url is None:
                engine = with_model({"log_level": "warning", **engine})
                for line in notice_lines(options):
                    LOGGER.info(line)
            asyncio.run(_run(options, engine, answers, todo, tally))
    except asyncio.CancelledError:
        pass  # the second Ctrl-C
    finally:
        output.close()
        if not todo or tally.num_open < len(todo):
            print(tally.summary(), file=sys.stderr)
    if tally.num_open:
        print("stopped before the end; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    return int(tally.num_failed > 0)


@dataclass(slots=True)
class Tally:
    """Writes answers and counts them. `num_before` of `num_requests` were answered in an earlier run."""

    output: BatchOutput
    num_requests: int
    num_before: int
    num_answered: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def num_open(self) -> int:
        return self.num_requests - self.num_before - self.num_answered - self.num_failed

    def add(self, answer: BatchAnswer) -> None:
        self.output.write(answer)
        if answer.error is not None:
            self.num_failed += 1
            return
        self.num_answered += 1
        if answer.usage is not None:
            self.num_prompt_tokens += answer.usage.num_prompt_tokens
            self.num_cached_tokens += answer.usage.num_cached_tokens or 0

    def summary(self) -> str:
        parts = [f"{self.num_answered:,} answered", f"{self.num_failed:,} failed"]
        if self.num_failed:
            parts[-1] += f" (why: {self.output.path})"
        if self.num_before:
            parts.append(f"{self.num_before:,} were answered before")
        if self.num_open:
            parts.append(f"{self.num_open:,} left")
        if self.num_prompt_tokens:
            parts.append(f"{self.num_cached_tokens:,} of {self.num_prompt_tokens:,} prompt tokens cached")
        return ", ".join(parts)


async def _run(
    options: argparse.Namespace,
    engine: dict[str, Any],
    answers: dict[str, Any],
    requests: Sequence[BatchRequest],
    tally: Tally,
) -> None:
    where: AbstractAsyncContextManager[str] = nullcontext(options.url)
    if options.url is None:
        names = {str(request.body["model"]) for request in requests if request.body and request.body.get("model")}
        served = (*answers.get("served_model_name", ()), *sorted(names))
        where = local_server(EngineConfig.from_flat(**engine), {**answers, "served_model_name": served})
    async with where as url, Server(url, api_key=options.api_key) as server:
        stop = _stop_at_interrupt()
        shown = not options.disable_tqdm and sys.stderr.isatty()
        with tqdm(total=tally.num_requests, initial=tally.num_before, unit="req", disable=not shown) as bar:

            def on_answer(answer: BatchAnswer) -> None:
                tally.add(answer)
                bar.update()

            await run_batch(server, requests, on_answer, max_concurrency=options.max_concurrency, stop=stop)


def _stop_at_interrupt() -> asyncio.Event:
    """Return an event that the first Ctrl-C or SIGTERM sets, so that open requests may end.

    A second one cancels the current task.
    """
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def on_interrupt() -> None:
        if stop.is_set():
            task.cancel()
        else:
            print("\nwaiting for open requests; Ctrl-C again drops them", file=sys.stderr)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_interrupt)
    return stop


@asynccontextmanager
async def local_server(engine: EngineConfig, options: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield the URL of a server on a free loopback port that serves `engine` with `options` of ServerConfig.

    Entering raises what loading the model raises, and KeyboardInterrupt after a signal in the meantime. Leaving ends
    the server and its engine.
    """
    set_up_logging(engine.log_level)
    config = ServerConfig(host="127.0.0.1", port=0, **options)
    with opened(engine, config) as server:
        life, ready = asyncio.create_task(server.run()), asyncio.create_task(server.ready.wait())
        try:
            await asyncio.wait((ready, life), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
                raise KeyboardInterrupt  # the server handled the signal itself
            yield server.url
        finally:
            ready.cancel()
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life

"""`forkpoint chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from forkpoint.cli.generate import stream
from forkpoint.cli.model import require_no_engine_options, with_model
from forkpoint.cli.options import engine_options, sampling_params
from forkpoint.cli.stats import answer_line, cache_line
from forkpoint.client.answer import Answer
from forkpoint.config import EngineConfig
from forkpoint.errors import RequestError, ServerError
from forkpoint.obs.logs import wants_color
from forkpoint.params import FinishReason

HELP = "/reset starts over, Ctrl-C stops an answer, Ctrl-D ends"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and a line on how it came about. `refused`: there is no answer, and the question is taken back."""

    text: str
    statistics: str
    error: str | None = None
    refused: bool = False


Messages: TypeAlias = list[dict[str, Any]]
Show: TypeAlias = Callable[[str, str], None]  # prints a piece of an answer, and of the reasoning before it
Model: TypeAlias = Callable[[Messages, Show], Reply]


def chat(options: argparse.Namespace) -> int:
    """Read messages from standard input, a line each, and answer them; 1 if an answer failed."""
    with _local_model(options) if options.url is None else _server_model(options) as model:
        conversation = Conversation(model, options.system_prompt)
        for line in [options.quick] if options.quick is not None else _lines():
            if line == "/reset":
                conversation.reset()
            elif line.strip():
                conversation.ask(line)
    return int(conversation.failed)


@contextmanager
def _local_model(options: argparse.Namespace) -> Iterator[Model]:
    """Answers by a model loaded here."""
    engine = with_model({"log_level": "warning", **engine_options(options)})
    params = sampling_params(options, EngineConfig.from_flat(**engine))
    if sys.stderr.isatty():  # the log says nothing here, and importing torch takes seconds
        print(f"loading {engine['model']} ...", file=sys.stderr)
    from forkpoint.engine.llm import LLM

    def reply(messages: Messages, show: Show) -> Reply:
        try:
            last = stream(llm, llm.render_chat(messages), params, lambda text: show(text, ""))
        except RequestError as error:
            return Reply("", "", str(error), refused=True)
        completion = last.outputs[0]
        failed = completion.finish_reason is FinishReason.ERROR
        return Reply(completion.text, cache_line(last), completion.error if failed else None)

    with LLM(**engine) as llm:
        yield reply


@contextmanager
def _server_model(options: argparse.Namespace) -> Iterator[Model]:
    """Answers by a server. Ctrl-C ends an answer and keeps what came of it."""
    require_no_engine_options(engine_options(options))
    from forkpoint.cli.remote import connection
    from forkpoint.client.server import CHAT

    def reply(messages: Messages, show: Show) -> Reply:
        answer, error = Answer(), None
        try:
            ask(CHAT, {"messages": list(messages)}, answer, lambda delta: show(delta.text, delta.reasoning))
        except KeyboardInterrupt:
            pass
        except ServerError as raised:
            error = str(raised)
        return Reply(answer.text, answer_line(answer), error, refused=error is not None and not answer.text)

    with connection(options) as ask:
        yield reply


class Conversation:
    """The messages so far. An answer that was stopped is kept as far as it came."""

    def __init__(self, model: Model, system_prompt: str | None) -> None:
        self.failed = False
        self._model = model
        self._start = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._start)
        self._dim = ("\033[2m", "\033[0m") if wants_color(sys.stdout) else ("", "")

    def reset(self) -> None:
        self._messages = list(self._start)
        print("(new conversation)")

    def ask(self, text: str) -> None:
        """Print the answer as it comes, then a line of statistics."""
        self._messages.append({"role": "user", "content": text})
        reply = self._model(self._messages, self._show)
        if reply.error is not None:
            self.failed = True
            print(f"error: {reply.error}", file=sys.stderr)
        if reply.refused:
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": reply.text})
        print(f"\n{self._dimmed(reply.statistics)}", flush=True)

    def _show(self, text: str, reasoning: str) -> None:
        print(self._dimmed(reasoning) + text, end="", flush=True)

    def _dimmed(self, text: str) -> str:
        on, off = self._dim
        return f"{on}{text}{off}" if text else ""


def _lines() -> Iterator[str]:
    """Lines of standard input; with a prompt sign and editing where it is a terminal."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() its line editing)

        print(HELP)
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            print(f"\n({HELP})")

"""`forkpoint chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from forkpoint.cli.generate import stream
from forkpoint.cli.images import message_content, num_images
from forkpoint.cli.model import require_no_engine_options, with_model
from forkpoint.cli.options import engine_options, sampling_params
from forkpoint.cli.stats import answer_line
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta, Usage
from forkpoint.config import EngineConfig
from forkpoint.errors import RequestError, RequestFailedError, ServerError
from forkpoint.obs.logs import counted, wants_color
from forkpoint.params import FinishReason

HELP = "/reset starts over, Ctrl-C stops an answer, /exit or Ctrl-D ends"
IMAGES_HELP = "the path of an image file, typed or pasted into a message, shows the image to the model"

Messages: TypeAlias = list[dict[str, Any]]
Show: TypeAlias = Callable[[Delta], None]
# Fills the answer to a conversation and shows each delta. Raises RequestError, RequestFailedError or ServerError.
Model: TypeAlias = Callable[[Messages, Answer, Show], None]


def chat(options: argparse.Namespace) -> int:
    """Answer each line of standard input, or only `--quick`. Return 1 if an answer failed, otherwise 0."""
    opened, lines = _local_model, _lines()
    if options.url is not None:
        opened = _server_model
    if options.quick is not None:
        lines = iter([options.quick])
    with opened(options) as model:
        conversation = Conversation(model, options.system_prompt)
        for line in lines:
            match line.strip():
                case "/reset":
                    conversation.reset()
                case "/help":
                    print(f"({HELP})\n({IMAGES_HELP})")
                case "/exit":
                    break
                case "":
                    pass
                case _:
                    conversation.ask(line)
    return int(conversation.failed)


@contextmanager
def _local_model(options: argparse.Namespace) -> Iterator[Model]:
    """Load a model here, and yield the function that answers with it."""
    engine = with_model({"log_level": "warning", **engine_options(options)})
    params = sampling_params(options, EngineConfig.from_flat(**engine))
    if sys.stderr.isatty():  # the log is off, and importing torch takes seconds
        print(f"loading {engine['model']} ...", file=sys.stderr)
    from forkpoint.engine.llm import LLM

    def ask(messages: Messages, answer: Answer, show: Show) -> None:
        def add(text: str) -> None:
            answer.add(delta := Delta(text))
            show(delta)

        last = stream(llm, llm.render_chat(messages), params, add)
        completion = last.outputs[0]
        usage = Usage(len(last.prompt_token_ids), len(completion.token_ids), last.num_cached_tokens)
        answer.add(Delta(usage=usage, miss=last.cache.miss))
        if completion.finish_reason is FinishReason.ERROR:
            raise RequestFailedError(completion.error)

    with LLM(**engine) as llm:
        yield ask


@contextmanager
def _server_model(options: argparse.Namespace) -> Iterator[Model]:
    """Yield the function that lets a server answer. Ctrl-C ends an answer and keeps the text so far.

    Raises ConfigError for engine options, and what `connection` raises.
    """
    require_no_engine_options(engine_options(options))
    from forkpoint.cli.remote import connection
    from forkpoint.client.server import CHAT

    def ask(messages: Messages, answer: Answer, show: Show) -> None:
        with suppress(KeyboardInterrupt):
            send(CHAT, {"messages": list(messages)}, answer, show)

    with connection(options) as send:
        yield ask


class Conversation:
    """The messages so far. A stopped answer is kept with the text that it has. `failed`: an answer has failed."""

    def __init__(self, model: Model, system_prompt: str | None) -> None:
        self.failed = False
        self._model = model
        self._start: Messages = []
        if system_prompt:
            self._start.append({"role": "system", "content": system_prompt})
        self._messages = list(self._start)
        self._has_color = wants_color(sys.stdout)

    def reset(self) -> None:
        self._messages = list(self._start)
        print("(new conversation)")

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it comes, then a line of statistics; add both messages.

        An error is printed and sets `failed`. A question without any answer, or with an unreadable image, is not kept.
        """
        try:
            content = message_content(text)
        except OSError as unreadable:
            self.failed = True
            print(f"error: an image cannot be read: {unreadable}", file=sys.stderr)
            return
        if count := num_images(content):
            print(self._dimmed(f"({counted(count, 'image')})"))
        self._messages.append({"role": "user", "content": content})
        answer, error = Answer(), None
        try:
            self._model(self._messages, answer, self._show)
        except (RequestError, RequestFailedError, ServerError) as raised:
            self.failed, error = True, raised
            print(f"error: {error}", file=sys.stderr)
        if error is not None and not answer.text:
            self._messages.pop()  # remove the question that was not answered
            return
        self._messages.append({"role": "assistant", "content": answer.text})
        print(f"\n{self._dimmed(answer_line(answer))}", flush=True)

    def _show(self, delta: Delta) -> None:
        print(self._dimmed(delta.reasoning) + delta.text, end="", flush=True)

    def _dimmed(self, text: str) -> str:
        if not text or not self._has_color:
            return text
        return f"\033[2m{text}\033[0m"


def _lines() -> Iterator[str]:
    """Yield lines of standard input until its end, also after Ctrl-C. A terminal gets a prompt and line editing."""
    interactive, prompt = sys.stdin.isatty(), ""
    if interactive:
        import readline  # noqa: F401  (gives input() its line editing)

        print(HELP)
        prompt = "> "
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            print(f"\n({HELP})")

"""`forkpoint chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from forkpoint.cli.options import engine_options, sampling_params
from forkpoint.cli.stats import cache_line
from forkpoint.engine.llm import LLM
from forkpoint.errors import RequestError
from forkpoint.obs.logs import wants_color
from forkpoint.outputs import RequestOutput
from forkpoint.params import FinishReason, SamplingParams

HELP = "/reset starts over, Ctrl-C stops an answer, Ctrl-D ends"


def chat(options: argparse.Namespace) -> int:
    """Read messages from standard input, a line each, and answer them; 1 if an answer failed."""
    params = sampling_params(options)
    engine = engine_options(options)
    engine.setdefault("log_level", "warning")
    with LLM(**engine) as llm:
        conversation = Conversation(llm, params, options.system_prompt)
        for line in [options.quick] if options.quick is not None else _lines():
            if line == "/reset":
                conversation.reset()
            elif line.strip():
                conversation.ask(line)
    return int(conversation.failed)


class Conversation:
    """The messages so far. An answer that was stopped is kept as far as it came."""

    def __init__(self, llm: LLM, params: SamplingParams, system_prompt: str | None) -> None:
        self.failed = False
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._start)
        self._dim = ("\033[2m", "\033[0m") if wants_color(sys.stdout) else ("", "")

    def reset(self) -> None:
        self._messages = list(self._start)
        print("(new conversation)")

    def ask(self, text: str) -> None:
        """Print the answer as it comes, then a line of statistics."""
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._llm.render_chat(self._messages)
            last = self._print_stream(self._llm.stream(prompt, self._params))
        except RequestError as error:
            self.failed = True
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        completion = last.outputs[0]
        if completion.finish_reason is FinishReason.ERROR:
            self.failed = True
            print(f"error: {completion.error}", file=sys.stderr)
        self._messages.append({"role": "assistant", "content": completion.text})
        on, off = self._dim
        print(f"{on}{cache_line(last)}{off}", flush=True)

    def _print_stream(self, outputs: Iterator[RequestOutput]) -> RequestOutput:
        shown = 0
        last: RequestOutput | None = None
        for last in outputs:
            text = last.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
        print()
        assert last is not None
        return last


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

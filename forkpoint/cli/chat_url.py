"""The model behind `forkpoint chat --url`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkpoint.cli.chat import Reply, Show
from forkpoint.cli.remote import Remote
from forkpoint.cli.stats import answer_line
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta
from forkpoint.client.server import CHAT
from forkpoint.errors import ServerError


class ServerModel:
    """Answers by a server. Ctrl-C ends an answer and keeps what came of it."""

    def __init__(self, remote: Remote, fields: Mapping[str, Any]) -> None:
        """`fields` are the sampling parameters to send."""
        self._remote = remote
        self._fields = fields

    def reply(self, messages: Sequence[Mapping[str, Any]], show: Show) -> Reply:
        answer = Answer()
        error: str | None = None
        try:
            self._remote.stream(CHAT, {"messages": list(messages), **self._fields}, answer, _shower(show))
        except KeyboardInterrupt:
            pass
        except ServerError as raised:
            error = str(raised)
        return Reply(answer.text, answer_line(answer), error, refused=error is not None and not answer.text)


def _shower(show: Show) -> Callable[[Delta], None]:
    def show_delta(delta: Delta) -> None:
        show(delta.text, delta.reasoning)

    return show_delta

"""Parses the parts of OpenAI's responses that the clients read, for chats and plain completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.checks import member
from forkpoint.errors import BrokenAnswerError, ServerRefusedError

API_KEY_VARIABLE: Final = "FORKPOINT_API_KEY"
NO_KEY: Final = 401  # the status for a missing or unknown API key
LINE_END: Final = re.compile(rb"\r\n|\n|\r")  # line endings of server-sent events


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer so far.

    `num_cached_tokens` of the prompt tokens came from the cache; None if the server does not say.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None = None

    @classmethod
    def read(cls, document: object) -> Usage | None:
        """Return the usage of an answer or a streamed chunk; None if it has none. Absent counts are 0.

        The Responses API has `input_tokens` and `output_tokens`.
        """
        usage = member(document, "usage")
        if not isinstance(usage, Mapping):
            return None
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return cls(
            num_prompt_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
            num_completion_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
            num_cached_tokens=details.get("cached_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What one streamed chunk adds to an answer. `miss` is forkpoint's reason why no more of the prompt was cached."""

    text: str = ""
    reasoning: str = ""
    has_tool_call: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    miss: str | None = None

    @property
    def carries_tokens(self) -> bool:
        return bool(self.text or self.reasoning or self.has_tool_call)


def read_chunk(data: str) -> list[Delta]:
    """Parse one streamed event: a delta for each choice, then one for usage and miss, if it has them.

    Raises ServerRefusedError for an error event, and BrokenAnswerError for a malformed one.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenAnswerError(f"the server sent an event that is not JSON: {data!r:.120}") from error
    if not isinstance(document, Mapping):
        raise BrokenAnswerError(f"the server sent an event that is not an object: {data!r:.120}")
    if "error" in document:
        raise refusal(None, document)
    deltas = [_delta(choice) for choice in document.get("choices") or ()]
    usage, miss = Usage.read(document), member(document.get("cache"), "miss")
    if usage is not None or miss is not None:
        deltas.append(Delta(usage=usage, miss=miss))
    return deltas


def refusal(status: int | None, document: object) -> ServerRefusedError:
    """Return the error that a response body describes; a bare `detail` or another shape is shown unchanged.

    Its status is `status`, or the error's own integer `code` if that is None. A refused API key is answered with the
    option that gives one, since the server's own text is about HTTP headers.
    """
    if status == NO_KEY:
        text = f"the request has no valid API key; give one with --api-key or in the variable {API_KEY_VARIABLE}"
        return ServerRefusedError(text, status=status)
    if not isinstance(document, Mapping):
        return ServerRefusedError(str(document)[:400] or "no reason given", status=status)
    error = document.get("error", document)
    if not isinstance(error, Mapping):
        return ServerRefusedError(str(error), status=status)
    message = error.get("message") or error.get("detail") or json.dumps(document)[:400]
    code = error.get("code")
    return ServerRefusedError(str(message), status=status or (code if isinstance(code, int) else None))


def _delta(choice: Mapping[str, Any]) -> Delta:
    # A streamed chat has `delta`, a whole chat `message`. A plain completion has its text at the top level.
    part = choice.get("delta") or choice.get("message") or {}
    return Delta(
        text=choice.get("text") or part.get("content") or "",
        reasoning=part.get("reasoning_content") or part.get("reasoning") or "",
        has_tool_call=bool(part.get("tool_calls")),
        finish_reason=choice.get("finish_reason"),
    )


class EventDecoder:
    """Decodes a text/event-stream that is received in arbitrary pieces. Event names and comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[str]:
        """Return the data of each event that `received` completes with an empty line."""
        buffer = self._rest + received
        # A carriage return at the end may be the first half of a line ending.
        end = len(buffer) - buffer.endswith(b"\r")
        *lines, rest = LINE_END.split(buffer[:end])
        self._rest = rest + buffer[end:]
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", errors="replace"))
                self._data.clear()
        return events

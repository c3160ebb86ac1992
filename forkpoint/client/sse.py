"""Server-sent events, as far as OpenAI's API uses them: the data of unnamed events."""

from __future__ import annotations

import re
from typing import Final

LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EventDecoder:
    """Turns the bytes of a text/event-stream, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of each event that `received` completes; an event ends at an empty line."""
        buffer = self._rest + received
        # A carriage return at the very end may be the first half of a line end.
        end = len(buffer) - 1 if buffer.endswith(b"\r") else len(buffer)
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

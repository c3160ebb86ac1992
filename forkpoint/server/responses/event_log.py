"""The events of a response that runs in the background, which several streams may read at different times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class EventLog:
    """Keeps all events of one response. A stream reads those that there are and waits for the rest."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_whole = False
        self._changed = asyncio.Event()  # set once there are more events, or no more will come; then replaced

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def close(self) -> None:
        """End the streams, because no more events will come."""
        self._is_whole = True
        self._wake()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from the number `start` on, those to come included."""
        while True:
            while start < len(self._events):
                yield self._events[start]
                start += 1
            if self._is_whole:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

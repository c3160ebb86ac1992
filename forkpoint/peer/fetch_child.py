"""The process that fetches prompts for an engine, and the messages between both.

A thread that fetches needs the interpreter for a moment after each call of the system. In the engine's own process, a
step would wait for such threads at each of its hundreds of calls.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from forkpoint.cache.peer_offers import Fetch
from forkpoint.peer.fetching import LOGGER, Fetching
from forkpoint.shared_arrays import OpenedMemory, Place

NEWS_S: Final = 0.004  # what has arrived is reported so often


class Identity(NamedTuple):
    """The first message to the process: the arguments of Fetching."""

    namespace: bytes
    unit_bytes: Mapping[int, int]
    rank: int


class Start(NamedTuple):
    """Fetch these entries to these places of the engine's memory. `shares_memory`: as in Fetching."""

    fetch: Fetch
    places: tuple[Place, ...]
    shares_memory: bool


class Forget(NamedTuple):
    """Stop a fetch. The process answers with Freed."""

    ticket: int


class Freed(NamedTuple):
    """Nothing is written to the places of a fetch any more."""

    ticket: int


class LogLine(NamedTuple):
    level: int
    text: str


class _Fetching(Fetching):
    """Fetches to the engine's memory, and says when a fetch that was forgotten has ended."""

    def __init__(self, identity: Identity, connection: Connection) -> None:
        super().__init__(*identity)
        self._connection, self._memory = connection, OpenedMemory()
        self._sending = threading.Lock()
        self._mapped: dict[tuple[int, ...], Any] = {}  # an array of each memory, which stays mapped for later fetches

    def send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def begin(self, order: Start) -> None:
        self.shares_memory = order.shares_memory
        self.start(order.fetch, [self._view(*each) for each in zip(order.places, order.fetch.names, strict=True)])

    def _view(self, place: Place, name: Any) -> memoryview:
        array = self._memory.array(place, "u1", (self._unit_bytes[name.kind],))
        self._mapped.setdefault(place[:3], array)
        return array.data

    def _give_all(self, ticket: int, entries: Iterable[memoryview | None]) -> None:
        self.send(Freed(ticket))

    def report(self) -> None:
        """Send news for as long as the process runs."""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_fetching)
            news = self.news(NEWS_S)
            if news is not None:
                self.send(news)

    def _is_fetching(self) -> bool:
        return bool(self._running or self._ended.done or self._ended.failed)


class _Forwarding(logging.Handler):
    """Sends lines of the log to the engine, which writes them."""

    def __init__(self, fetching: _Fetching) -> None:
        super().__init__()
        self._fetching = fetching

    def emit(self, record: logging.LogRecord) -> None:
        self._fetching.send(LogLine(record.levelno, record.getMessage()))


def main(descriptor: int) -> None:
    """Carry out what comes over a connection until the engine closes it or ends."""
    connection = Connection(descriptor)
    try:
        fetching = _Fetching(connection.recv(), connection)
        LOGGER.addHandler(_Forwarding(fetching))
        LOGGER.propagate = False
        threading.Thread(target=fetching.report, name="news", daemon=True).start()
        while True:
            message = connection.recv()
            if isinstance(message, Start):
                fetching.begin(message)
            else:
                fetching.forget(message.ticket)
    except (EOFError, OSError):  # the engine has ended
        os._exit(0)  # threads may still wait for other engines

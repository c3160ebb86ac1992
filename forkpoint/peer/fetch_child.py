"""The process that fetches prompts for an engine, and the messages between both.

A thread that fetches needs the interpreter for a moment after each call of the system. In the engine's own process, a
step would wait for such threads at each of its hundreds of calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from forkpoint.cache.peer_offers import Fetch, FetchReport
from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.fetching import LOGGER, Fetching, RunningFetch
from forkpoint.peer.ring import RingFacts
from forkpoint.shared_arrays import OpenedMemory, Place

REPORT_S: Final = 0.004  # seconds between two reports of what has arrived
ENGINE_CHECK_S: Final = 1.0  # seconds between two looks whether the engine still runs


class Identity(NamedTuple):
    """The first message to the process: the arguments of Fetching."""

    namespace: bytes
    unit_bytes: Mapping[int, int]
    rank: int


class Start(NamedTuple):
    """Fetch these entries to these places of the engine's memory. `shares_memory`: as in Fetching.

    Entries of the `ring` with this id are not fetched. The process answers with their positions, InRing.
    """

    fetch: Fetch
    places: tuple[Place, ...]
    shares_memory: bool
    ring: bytes = b""


class Forget(NamedTuple):
    """Stop a fetch. The process answers with Freed."""

    ticket: int


class Freed(NamedTuple):
    """Nothing is written to the places of a fetch any more."""

    ticket: int


class FoundRing(NamedTuple):
    """The other engine of a fetch has a ring, which is not the one that Start named."""

    ticket: int
    ring: RingFacts


class InRing(NamedTuple):
    """The positions of entries in the ring, by ticket and place of the entry. Comes before they are reported."""

    positions: Mapping[int, Mapping[int, int]]


class LogLine(NamedTuple):
    level: int
    text: str


class _Fetching(Fetching):
    """Fetches to the engine's memory, and says when nothing is written there any more.

    The thread of `report` alone sends. The engine may send while it does not read, so the thread that reads must not
    wait for it.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(*identity)
        self._memory = OpenedMemory()
        self._mapped: dict[tuple[int, ...], Any] = {}  # an array of each memory, which stays mapped for later fetches
        # Guarded by the lock of Fetching:
        self._unsent: list[FetchReport | Freed | FoundRing | InRing | LogLine] = []
        self._positions: dict[int, dict[int, int]] = {}  # for the next InRing

    def add(self, message: FetchReport | Freed | FoundRing | LogLine) -> None:
        """Let `report` send a message."""
        with self._changed:
            self._unsent.append(message)
            self._changed.notify_all()

    def begin(self, order: Start) -> None:
        """Start a fetch, or report that it fails because the engine's memory cannot be opened."""
        self.shares_memory = order.shares_memory
        try:
            buffers = [self._view(*each) for each in zip(order.places, order.fetch.names, strict=True)]
        except OSError as error:
            LOGGER.warning("a prompt is computed instead of fetched: this engine's memory cannot be opened: %s", error)
            self.add(FetchReport(failed=(order.fetch.ticket,)))
            return
        self.start(order.fetch, buffers, order.ring)

    def _view(self, place: Place, name: EntryName) -> memoryview:
        array = self._memory.array(place, "u1", (self._unit_bytes[name.kind],))
        self._mapped.setdefault(place[:3], array)
        return array.data

    def _give_all(self, ticket: int, entries: Iterable[memoryview | None]) -> None:
        self.add(Freed(ticket))

    def _note_ring(self, fetch: Fetch, ring: RingFacts) -> None:
        self.add(FoundRing(fetch.ticket, ring))

    def _note_position(self, running: RunningFetch, index: int) -> None:
        self._positions.setdefault(running.fetch.ticket, {})[index] = running.positions[index]

    def report(self, connection: Connection) -> None:
        """Send what is to be sent for as long as the engine runs."""
        with contextlib.suppress(OSError):  # the engine has ended
            while True:
                with self._changed:
                    self._changed.wait_for(self._is_active)
                report = None if self._unsent else self.next_report(REPORT_S)
                with self._changed:
                    messages, self._unsent = self._unsent, []
                    positions, self._positions = self._positions, {}
                if positions:
                    messages.append(InRing(positions))
                for message in [*messages, *([] if report is None else [report])]:
                    connection.send(message)

    def _is_active(self) -> bool:
        return bool(self._running or self._unsent or self._unreported)


class _Forwarding(logging.Handler):
    """Passes lines of the log on to the engine, which writes them."""

    def __init__(self, fetching: _Fetching) -> None:
        super().__init__()
        self._fetching = fetching

    def emit(self, record: logging.LogRecord) -> None:
        self._fetching.add(LogLine(record.levelno, record.getMessage()))


def main(descriptor: int, engine: int) -> None:
    """Carry out what comes over a connection until the engine, a process with this id, closes it or ends."""
    connection = Connection(descriptor)
    try:
        fetching = _Fetching(connection.recv())
        LOGGER.addHandler(_Forwarding(fetching))
        LOGGER.propagate = False
        threading.Thread(target=fetching.report, args=(connection,), name="report", daemon=True).start()
        while True:
            while not connection.poll(ENGINE_CHECK_S):
                if os.getppid() != engine:  # its forks may hold the connection open
                    raise EOFError
            message = connection.recv()
            if isinstance(message, Start):
                fetching.begin(message)
            else:
                fetching.forget(message.ticket)
    except (EOFError, OSError):  # the engine has ended
        os._exit(0)  # threads may still wait for other engines
    except BaseException:
        traceback.print_exc()  # the thread that forwards log lines would not come to it
        os._exit(1)

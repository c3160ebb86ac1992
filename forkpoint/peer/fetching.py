"""The decode engine's side: threads that fetch prompts into buffers, so that no step waits for another engine."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from forkpoint.cache.peer_offers import Fetch, FetchNews
from forkpoint.disk.namespace import entry_sum
from forkpoint.peer.offered import key_of
from forkpoint.peer.protocol import DONE, HeldEntries, Line, PeerError, WantedEntries

NUM_THREADS: Final = 8
END_S: Final = 2.0  # for telling a peer that its lease has ended
LOGGER: Final = logging.getLogger("forkpoint")


class _NotHeldError(Exception):
    """The peer answers, but does not have what was offered, or has damaged it."""


@dataclass(slots=True)
class _Ended:
    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    unreachable: list[int] = field(default_factory=list)


class Fetching:
    """Fetches entries whose sizes are `unit_bytes`, by kind. `news` says which fetches have ended.

    What was fetched waits in a buffer until `forget`. The caller bounds the bytes of all fetches. Each failure is one
    line in the log.
    """

    def __init__(self, namespace: bytes, unit_bytes: Mapping[int, int]) -> None:
        self._namespace, self._unit_bytes = namespace, unit_bytes
        self._threads = ThreadPoolExecutor(NUM_THREADS, "fetch")
        self._changed = threading.Condition()  # guards all below
        self._fetched: dict[int, list[memoryview]] = {}  # by ticket: each entry's bytes
        self._forgotten: set[int] = set()  # tickets of fetches that have not ended and that nobody wants
        self._running: set[int] = set()
        self._ended = _Ended()

    # --- called by the worker's thread

    def start(self, fetch: Fetch) -> None:
        if fetch.names:
            with self._changed:
                self._running.add(fetch.ticket)
        self._threads.submit(self._run, fetch, time.monotonic() + fetch.timeout_s)

    def take(self, ticket: int, place: int, target: memoryview) -> None:
        """Copy an entry that was fetched to `target`."""
        with self._changed:
            source = self._fetched[ticket][place]
        target[:] = source

    def forget(self, ticket: int) -> None:
        with self._changed:
            self._fetched.pop(ticket, None)
            if ticket in self._running:
                self._forgotten.add(ticket)

    def news(self, wait_s: float = 0.0) -> FetchNews | None:
        """Return what has ended since the last call; None if that is nothing. Wait so long for the first."""
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: self._ended.done or self._ended.failed, wait_s)
            ended, self._ended = self._ended, _Ended()
        if not ended.done and not ended.failed:
            return None
        return FetchNews(tuple(ended.done), tuple(ended.failed), tuple(ended.unreachable))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- threads of their own

    def _run(self, fetch: Fetch, until_s: float) -> None:
        if not fetch.names:
            with contextlib.suppress(OSError, PeerError), self._connect(fetch, time.monotonic() + END_S) as line:
                line.send(self._wanted(fetch))
            return
        entries: list[memoryview] | None = None
        is_unreachable = False
        with self._changed:
            is_wanted = fetch.ticket not in self._forgotten
        try:
            if is_wanted:
                entries = self._fetch(fetch, until_s)
        except (_NotHeldError, OSError, PeerError) as error:
            is_unreachable = not isinstance(error, _NotHeldError)
            LOGGER.warning("the prompt at %s port %d is computed instead of fetched: %s", fetch.host, fetch.port, error)
        with self._changed:
            self._running.discard(fetch.ticket)
            if fetch.ticket in self._forgotten:
                self._forgotten.discard(fetch.ticket)
            elif entries is None:
                self._ended.failed.append(fetch.ticket)
                if is_unreachable:
                    self._ended.unreachable.append(fetch.ticket)
            else:
                self._fetched[fetch.ticket] = entries
                self._ended.done.append(fetch.ticket)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _connect(self, fetch: Fetch, until_s: float) -> Iterator[Line]:
        left = until_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        with socket.create_connection((fetch.host, fetch.port), left) as connection:
            yield Line(connection, until_s)

    def _wanted(self, fetch: Fetch) -> WantedEntries:
        return WantedEntries(self._namespace, fetch.engine_id, fetch.lease, tuple(map(key_of, fetch.names)))

    def _fetch(self, fetch: Fetch, until_s: float) -> list[memoryview] | None:
        """Return the bytes of the entries, in their order. Their checksums are right. None: nobody wants them.

        Raises _NotHeldError if the other engine lacks them, PeerError for a wrong answer, and OSError.
        """
        with self._connect(fetch, until_s) as line:
            line.send(self._wanted(fetch))
            held: HeldEntries = line.receive(HeldEntries)
            if held.refusal:
                raise _NotHeldError(held.refusal)
            if len(held.sums) != len(fetch.names):
                raise PeerError("it sent checksums of other entries")
            entries: list[memoryview] = []
            for name, checksum in zip(fetch.names, held.sums, strict=True):
                if fetch.ticket in self._forgotten:
                    return None
                data = memoryview(bytearray(self._unit_bytes[name.kind]))
                line.receive_into(data)
                if entry_sum(self._namespace, name, data) != checksum:
                    raise _NotHeldError("the checksum of an entry is wrong")
                entries.append(data)
            with contextlib.suppress(OSError):  # it has sent everything; its lease ends by itself
                line.send_bytes(DONE)
        return entries

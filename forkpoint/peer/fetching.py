"""The decode engine's side: threads that fetch prompts into buffers, so that no step waits for another engine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from forkpoint.cache.peer_offers import Fetch, FetchReport
from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.offered import key_of
from forkpoint.peer.peer_threads import PeerThreads
from forkpoint.peer.protocol import (
    DONE,
    GONE,
    IN_RING,
    PART_NUMBER,
    SHARED,
    SILENCE_S,
    HeldEntries,
    Line,
    PeerError,
    WantedEntries,
    complete_head,
    num_parts,
    part_of,
    part_sum,
)
from forkpoint.peer.ring import RingFacts
from forkpoint.shared_arrays import CAN_SHARE, MemoryReader

NUM_FETCHES: Final = 8  # fetches from a peer at the same time
MOST_CONNECTIONS: Final = 8  # connections of a fetch; each has a thread, which also computes checksums
RING_CONNECTIONS: Final = 2  # the same, if most entries stay in a ring and no bytes follow
BYTES_OF_CONNECTION: Final = 2**25  # bytes for which a fetch opens another connection
PROGRESS_BYTES: Final = 2**25  # arrived bytes that wake up a worker without other work
END_S: Final = 2.0  # time to tell a peer that its lease has ended
LOGGER: Final = logging.getLogger("forkpoint")


class _NotHeldError(Exception):
    """The peer answers, but does not have what was offered, or has damaged it."""


class _NotSharedError(Exception):
    """The peer's memory cannot be read, although it seems to be on this machine."""


class _UnwantedError(Exception):
    """Nobody waits for this fetch any more, or another part of it has failed."""


@dataclass(slots=True)
class Unreported:
    """The next report: tickets of fetches that have ended, and the numbers of arrived entries by ticket."""

    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    unreachable: list[int] = field(default_factory=list)  # also among the failed ones
    arrived: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.done or self.failed or self.arrived)

    def report(self) -> FetchReport | None:
        """Return the report; None if there is nothing to say."""
        if not self:
            return None
        arrived = tuple(self.arrived.items())
        return FetchReport(tuple(self.done), tuple(self.failed), tuple(self.unreachable), arrived)


class RunningFetch:
    """A fetch that has not ended: its buffers, and its connections, which `stop` ends."""

    def __init__(self, fetch: Fetch, until_s: float, buffers: Sequence[memoryview], ring: bytes) -> None:
        self.fetch, self.until_s, self.ring = fetch, until_s, ring
        self.entries: list[memoryview | None] = [*buffers] or [None] * len(fetch.names)
        # Guarded by the lock of Fetching:
        self.arrived: list[set[int]] = [set() for _ in fetch.names]  # parts of each entry
        self.positions: dict[int, int] = {}  # of entries that are in the other engine's ring
        self.num_arrived = self.num_reported = 0  # how many of the first entries have arrived, and were reported
        self.unreported_bytes = 0  # bytes that have arrived and were not reported
        self._lock = threading.Lock()  # guards all below
        self._lines: set[Line] = set()
        self._is_stopped = self._is_filling = False
        self.is_free = False  # it was stopped before anything was written to its buffers

    def buffer(self, index: int, num_bytes: int, take: Callable[[int], memoryview]) -> memoryview:
        """Return the buffer of an entry, which several connections fill. Raises _UnwantedError after `stop`."""
        with self._lock:
            self._check()
            self._is_filling = True
            found = self.entries[index]
            if found is None:
                found = self.entries[index] = take(num_bytes)
            return found

    def stop(self) -> None:
        """End its connections. `is_free` says whether nothing was written; then nothing will be."""
        with self._lock:
            self.is_free = not self._is_filling
            self._is_stopped = True
            for line in self._lines:
                line.end()

    @contextlib.contextmanager
    def connect(self, rank: int) -> Iterator[Line]:
        """Connect to the other engine's rank. Raises OSError, and _UnwantedError after `stop`."""
        with self._lock:
            self._check()
        with _connect(self.fetch, rank, self.until_s) as line:
            with self._lock:
                self._check()
                self._lines.add(line)
            try:
                yield line
            except (OSError, PeerError):
                with self._lock:
                    self._check()  # `stop` has ended the connection
                raise
            finally:
                with self._lock:
                    self._lines.discard(line)

    def _check(self) -> None:
        if self._is_stopped:
            raise _UnwantedError


class Fetching:
    """Fetches entries whose sizes are `unit_bytes`, by kind. `next_report` says which fetches have ended.

    It also says how many of a fetch's first entries have arrived, so that they can be used before the others come. An
    entry waits in a buffer until `forget`, even if its fetch fails. The caller bounds the bytes of all fetches. Each
    failure is one line in the log.
    """

    def __init__(self, namespace: bytes, unit_bytes: Mapping[int, int], rank: int = 0) -> None:
        self._namespace, self._unit_bytes, self._rank = namespace, unit_bytes, rank
        self.take: Callable[[int], memoryview] = lambda num_bytes: memoryview(bytearray(num_bytes))
        self.give: Callable[[memoryview], None] = lambda buffer: None  # takes buffers that are not needed any more
        self.shares_memory = CAN_SHARE  # False: entries come over TCP alone
        self._threads = PeerThreads(NUM_FETCHES)
        self._changed = threading.Condition()  # guards all below; `contents` alone reads without it
        self._entries: dict[int, list[memoryview | None]] = {}  # by ticket: the buffers of a fetch, until `forget`
        self._running: dict[int, RunningFetch] = {}  # by ticket
        self._unreported = Unreported()
        self._left_rings: set[bytes] = set()  # ids of rings that no longer had most of the last prompt

    # --- called by the worker's thread

    def start(self, fetch: Fetch, buffers: Sequence[memoryview] = (), ring: bytes = b"") -> None:
        """Start a fetch, to these buffers if they are given. Entries of the `ring` with this id stay there."""
        until_s = time.monotonic() + fetch.timeout_s
        peer = fetch.host, fetch.ports[self._rank]
        if not fetch.names:
            with contextlib.suppress(RuntimeError):  # no thread: the lease ends by itself
                self._threads.submit(peer, partial(self._end_lease, fetch))
            return
        running = RunningFetch(fetch, until_s, buffers, ring)
        with self._changed:
            self._running[fetch.ticket], self._entries[fetch.ticket] = running, running.entries
            self._changed.notify_all()
        try:
            self._threads.submit(peer, partial(self._run, running))
        except RuntimeError as error:
            self._end(running, error)

    def contents(self, ticket: int, place: int) -> memoryview:
        """Return an entry that has arrived. It is valid until `forget`.

        Steps call this for each entry. They take no lock, for which they would wait as long as a thread that holds it
        waits for the interpreter.
        """
        running, entry = self._running.get(ticket), self._entries[ticket][place]
        assert entry is not None and (running is None or place < running.num_arrived), "it has not arrived"
        return entry

    def forget(self, ticket: int) -> None:
        with self._changed:
            entries, running = self._entries.pop(ticket, []), self._running.get(ticket)
            if running is not None:
                running.stop()
        if running is None or running.is_free:
            self._give_all(ticket, entries)

    def _give_all(self, ticket: int, entries: Iterable[memoryview | None]) -> None:
        """Give back the buffers of a fetch that was forgotten, to which nothing is written any more."""
        for entry in entries:
            if entry is not None:
                self.give(entry)

    def next_report(self, wait_s: float = 0.0) -> FetchReport | None:
        """Return which fetches have ended or progressed since the last call; None if none has.

        Wait at most `wait_s` until a fetch has ended or PROGRESS_BYTES of one have arrived.
        """
        with self._changed:
            if wait_s:
                self._changed.wait_for(self._has_report, wait_s)
            unreported, self._unreported = self._unreported, Unreported()
            for ticket, running in self._running.items():
                if running.num_arrived > running.num_reported:
                    running.num_reported, running.unreported_bytes = running.num_arrived, 0
                    unreported.arrived[ticket] = running.num_arrived
        return unreported.report()

    def _has_report(self) -> bool:
        if self._unreported:
            return True
        return any(running.unreported_bytes >= PROGRESS_BYTES for running in self._running.values())

    def close(self) -> None:
        with self._changed:
            left = list(self._running.values())
        for running in left:
            running.stop()

    # --- threads of their own

    def _end_lease(self, fetch: Fetch) -> None:
        with (
            contextlib.suppress(OSError, PeerError),
            _connect(fetch, self._rank, time.monotonic() + END_S) as line,
        ):
            line.send(WantedEntries(self._namespace, fetch.engine_id, fetch.lease, ()))

    def _run(self, running: RunningFetch) -> None:
        failure: Exception | None = None
        try:
            self._fetch(running)
        except Exception as error:  # also RuntimeError, if the system starts no more threads
            failure = error
        if self._end(running, failure):
            self._end_lease(running.fetch)

    def _end(self, running: RunningFetch, failure: Exception | None) -> bool:
        """Note the end of a fetch, and the error if it failed. Returns whether its lease has to be ended."""
        fetch, is_unreachable = running.fetch, isinstance(failure, (OSError, PeerError, _UnwantedError))
        if isinstance(failure, TimeoutError) and time.monotonic() >= running.until_s and any(running.arrived):
            is_unreachable = False  # the peer sends, too slowly for this fetch
        if failure is not None and not isinstance(failure, _UnwantedError):
            port = fetch.ports[self._rank]
            LOGGER.warning("the prompt at %s port %d is computed instead of fetched: %s", fetch.host, port, failure)
        with self._changed:
            del self._running[fetch.ticket]
            is_forgotten, is_given = fetch.ticket not in self._entries, running.is_free
            if not is_forgotten:  # even if it failed, some of its entries may be in use
                (self._unreported.failed if failure else self._unreported.done).append(fetch.ticket)
                if is_unreachable:
                    self._unreported.unreachable.append(fetch.ticket)
            self._changed.notify_all()
        if is_forgotten and not is_given:
            self._give_all(fetch.ticket, running.entries)
        return is_forgotten or not is_unreachable

    def _fetch(self, running: RunningFetch) -> None:
        """Fill `running.entries`, and check their checksums.

        Raises _NotHeldError if the other engine lacks entries, PeerError for a wrong answer, OSError, and
        _UnwantedError if nobody wants them.
        """
        sizes = [self._unit_bytes[name.kind] for name in running.fetch.names]
        parts = [(index, part) for index, size in enumerate(sizes) for part in range(num_parts(size))]
        most = min(MOST_CONNECTIONS, len(parts), max(1, (os.cpu_count() or 1) // 2))
        if running.ring and running.ring not in self._left_rings:
            most = min(most, RING_CONNECTIONS)
        count = max(1, min(most, sum(sizes) // BYTES_OF_CONNECTION))
        others, errors = list[Future[None]](), list[BaseException]()
        with ThreadPoolExecutor(MOST_CONNECTIONS, "fetch part") as helpers:  # it starts threads as it needs them
            try:
                for start in range(1, count):
                    others.append(helpers.submit(self._fetch_parts, running, parts[start::count]))
                self._fetch_parts(running, parts[::count])
            except Exception as error:
                running.stop()
                errors.append(error)
        errors += [found for other in others if (found := other.exception()) is not None]
        if errors:
            raise min(errors, key=lambda found: isinstance(found, _UnwantedError))  # rather the cause than its effects
        with self._changed:
            if len(running.positions) < len(sizes) / 2:
                self._left_rings.add(running.ring)
            else:
                self._left_rings.discard(running.ring)

    def _fetch_parts(self, running: RunningFetch, parts: Sequence[tuple[int, int]]) -> None:
        """Receive parts of entries, given as the place of an entry and the number of a part, over one connection."""
        try:
            try:
                self._receive(running, parts, self.shares_memory)
            except _NotSharedError:  # parts that have arrived may be in use already
                self._receive(running, [each for each in parts if each[1] not in running.arrived[each[0]]], False)
        except BaseException:
            running.stop()
            raise

    def _receive(self, running: RunningFetch, parts: Sequence[tuple[int, int]], may_share: bool) -> None:
        fetch = running.fetch
        with running.connect(self._rank) as line, MemoryReader() as memory:
            keys = tuple(key_of(fetch.names[index]) + PART_NUMBER.pack(part) for index, part in parts)
            shares = may_share and line.is_local
            ring = running.ring if shares else b""
            line.send(WantedEntries(self._namespace, fetch.engine_id, fetch.lease, keys, shares, ring))
            held: HeldEntries = line.receive(HeldEntries)
            if held.refusal:
                raise _NotHeldError(held.refusal)
            if held.ring is not None and not shares:
                raise PeerError("it does not send what it was asked for")
            if held.ring is not None and held.ring.ring_id != running.ring:
                self._note_ring(fetch, held.ring)
            for index, part in parts:
                name = fetch.names[index]
                buffer = running.buffer(index, self._unit_bytes[name.kind], self.take)
                position = self._receive_part(line, memory if shares else None, name, part, part_of(buffer, part))
                if position is not None and not ring:
                    raise PeerError("it does not send what it was asked for")
                self._note_arrival(running, index, part, position)
            if line.receive_head() != complete_head(self._namespace, fetch.names[parts[-1][0]]):
                raise _NotHeldError("its prompt was not computed to the end")
            with contextlib.suppress(OSError):  # it has sent everything; its lease ends by itself
                line.send_bytes(DONE)

    def _note_ring(self, fetch: Fetch, ring: RingFacts) -> None:
        """Note that later fetches may leave entries in the ring of this engine."""

    def _note_arrival(self, running: RunningFetch, index: int, part: int, position: int | None) -> None:
        """Note that a part has arrived, or that its entry is in the ring. Raises _NotHeldError.

        An entry that was offered again meanwhile is at several positions. The last one stays longest.
        """
        names = running.fetch.names
        with self._changed:
            known = running.positions.get(index)
            if running.arrived[index] and (known is None) != (position is None):
                raise _NotHeldError("an entry was written over while it was sent")
            if position is not None:
                running.positions[index] = position if known is None else max(known, position)
                self._note_position(running, index)
            running.arrived[index].add(part)
            while running.num_arrived < len(names):
                num_bytes = self._unit_bytes[names[running.num_arrived].kind]
                if len(running.arrived[running.num_arrived]) < num_parts(num_bytes):
                    break
                running.unreported_bytes += num_bytes
                running.num_arrived += 1
            if running.unreported_bytes >= PROGRESS_BYTES:
                self._changed.notify_all()

    def _note_position(self, running: RunningFetch, index: int) -> None:
        """Note that an entry is in the ring, with the lock."""

    def _receive_part(
        self, line: Line, memory: MemoryReader | None, name: EntryName, part: int, buffer: memoryview
    ) -> int | None:
        """Fill a buffer with a part, and check its checksum, or return the entry's position in the ring.

        Raises as `_fetch` does, and _NotSharedError. The checksum is that of the copy, so it does not matter what the
        other engine does with its memory afterwards.
        """
        head = line.receive_head()
        if head.status == GONE:
            raise _NotHeldError("the lease has ended, or its entries were withdrawn")
        position: int | None = None
        if head.status == IN_RING:
            position, buffer = head.place.offset, buffer[:0]
        elif head.status == SHARED:
            if memory is None:
                raise PeerError("it does not send what it was asked for")
            try:
                memory.read_into(head.place, buffer)
            except OSError as error:
                raise _NotSharedError from error
        else:
            line.receive_into(buffer)
        if part_sum(self._namespace, name, part, buffer) != head.sum:
            raise _NotHeldError("the checksum of an entry is wrong")
        return position


@contextlib.contextmanager
def _connect(fetch: Fetch, rank: int, until_s: float) -> Iterator[Line]:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    with socket.create_connection((fetch.host, fetch.ports[rank]), min(left_s, SILENCE_S)) as connection:
        yield Line(connection, until_s, SILENCE_S)

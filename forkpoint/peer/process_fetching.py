"""The decode engine's side of the process that fetches prompts for it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from forkpoint.cache.peer_offers import Fetch, FetchReport
from forkpoint.peer.fetch_child import Forget, FoundRing, Freed, Identity, InRing, LogLine, Start
from forkpoint.peer.fetching import LOGGER, Unreported
from forkpoint.peer.ring import RingFacts
from forkpoint.python_process import python_process
from forkpoint.shared_arrays import place_of

CLOSE_S: Final = 2.0  # time for the process to end
RING_AVOIDED_S: Final = 30.0  # nothing is left in a ring for so long after an entry was written over before its copy


class _Child:
    """The process and the connection to it. Raises OSError if it cannot be started."""

    def __init__(self, identity: Identity) -> None:
        self.connection, there = multiprocessing.Pipe()
        run = f"from forkpoint.peer.fetch_child import main; main({there.fileno()}, {os.getpid()})"
        try:
            self._process = python_process(run, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        except BaseException:
            self.connection.close()
            raise
        finally:
            there.close()
        self.connection.send(identity)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process. It writes nothing afterwards."""
        self.connection.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class _Ordered:
    """A fetch that was ordered, until `forget`. Its first `num_arrived` entries have arrived.

    They are in the buffers, or at `positions` of the ring with this id.
    """

    peer: tuple[str, int]
    buffers: list[memoryview]
    ring: bytes
    positions: dict[int, int] = field(default_factory=dict)  # by place of the entry
    num_arrived: int = 0
    is_reported: bool = False  # `next_report` has returned the fetch's end, or will do so


@dataclass(slots=True)
class _PeerRing:
    """A ring that another engine has named."""

    facts: RingFacts
    is_open: bool
    avoided_until_s: float = 0.0  # by `time.monotonic`


class ProcessFetching:
    """Fetches as `Fetching` does, in a process of its own, to buffers in shared memory.

    With `use_rings`, entries may also be left in the ring of the other engine's device, where `in_ring` finds them. If
    the process ends, its fetches fail, and the next fetch starts another process. The worker's thread and those that
    follow its copies may call it.
    """

    def __init__(self, namespace: bytes, unit_bytes: Mapping[int, int], rank: int = 0) -> None:
        self._identity = Identity(namespace, dict(unit_bytes), rank)
        self.take: Callable[[int], memoryview]  # `PeerLink.use_buffers` sets both
        self.give: Callable[[memoryview], None]
        self.shares_memory = True  # with other engines of this machine
        self._rank = rank
        self._open_ring: Callable[[RingFacts], bool] = lambda ring: False
        self._close_ring: Callable[[bytes], None] = lambda handle: None
        self._lock = threading.Lock()  # guards all below; `contents` alone reads without it
        self._ordered: dict[int, _Ordered] = {}  # by ticket
        self._written: set[int] = set()  # tickets of fetches to whose buffers the process may write
        self._leaving: dict[int, list[memoryview]] = {}  # by ticket: buffers that it may write after `forget`
        self._rings: dict[tuple[str, int], _PeerRing] = {}  # by the peer's address
        self._unreported = Unreported()
        self._child: _Child | None = None
        self._revive()  # it is ready when the first request comes

    def use_rings(self, open_ring: Callable[[RingFacts], bool], close_ring: Callable[[bytes], None]) -> None:
        """Leave entries in rings that `open_ring` opens. `close_ring` is called when a peer does not answer.

        Its argument is the ring's id.
        """
        self._open_ring, self._close_ring = open_ring, close_ring

    def start(self, fetch: Fetch) -> None:
        peer, buffers = (fetch.host, fetch.ports[self._rank]), list[memoryview]()
        try:
            for name in fetch.names:
                buffers.append(self.take(self._identity.unit_bytes[name.kind]))
        except (OSError, MemoryError) as error:
            LOGGER.warning("a prompt is computed instead of fetched: the system has no memory left for it: %s", error)
        found = [place_of(np.frombuffer(buffer, np.uint8)) for buffer in buffers]
        places = tuple(place for place in found if place is not None)
        with self._lock:
            ring = self._usable_ring(peer)
            if fetch.names:
                self._ordered[fetch.ticket] = _Ordered(peer, buffers, ring)
            if len(places) < len(buffers):
                LOGGER.warning("a prompt is computed instead of fetched: the system has no shared memory left for it")
            if len(places) < len(fetch.names) or not self._revive():
                self._fail(fetch.ticket)
                return
            self._written.update([fetch.ticket] if fetch.names else [])
            self._send(Start(fetch, places, self.shares_memory, ring))

    def contents(self, ticket: int, place: int) -> memoryview:
        """Return an entry that has arrived. It is valid until `forget`."""
        ordered = self._ordered[ticket]
        assert place < ordered.num_arrived, "it has not arrived"
        return ordered.buffers[place]

    def in_ring(self, ticket: int, place: int) -> tuple[bytes, int] | None:
        """Return the id of the ring that an arrived entry is in, and its position; None if it is in a buffer."""
        ordered = self._ordered[ticket]
        assert place < ordered.num_arrived, "it has not arrived"
        position = ordered.positions.get(place)
        return None if position is None else (ordered.ring, position)

    def leave_ring(self, ring_id: bytes) -> None:
        """Leave no entries of later fetches in a ring for a while: one was written over before it was copied.

        Requests that wait for long would lose one prompt after the other.
        """
        with self._lock:
            for ring in self._rings.values():
                if ring.facts.ring_id == ring_id:
                    ring.avoided_until_s = time.monotonic() + RING_AVOIDED_S

    def forget(self, ticket: int) -> None:
        with self._lock:
            ordered = self._ordered.pop(ticket, None)
            if ordered is None:
                return
            if ticket in self._written:
                self._leaving[ticket] = ordered.buffers
                self._send(Forget(ticket))
            else:
                self._give_all(ordered.buffers)

    def next_report(self, wait_s: float = 0.0) -> FetchReport | None:
        """Return what has ended or arrived since the last call; None if nothing has.

        With `wait_s`, wait at most so long until a fetch has ended or some of its entries have arrived.
        """
        until_s = time.monotonic() + wait_s
        while True:
            child, has_report = self._child, bool(self._unreported)
            left_s = 0.0 if has_report else max(0.0, until_s - time.monotonic())
            if child is None or not (self._written or left_s):
                if not has_report:
                    time.sleep(left_s)
                break
            try:
                if not child.connection.poll(left_s):
                    break
                message = child.connection.recv()
            except (EOFError, OSError):
                with self._lock:
                    if self._child is child:
                        self._lose_child()
                continue
            with self._lock:
                self._take(message)
        with self._lock:
            unreported, self._unreported = self._unreported, Unreported()
        return unreported.report()

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None
            self._written.clear()

    # --- with the lock

    def _take(self, message: Any) -> None:
        """Take in a message of the process."""
        if isinstance(message, LogLine):
            LOGGER.log(message.level, "%s", message.text)
        elif isinstance(message, FoundRing):
            self._use_ring(message)
        elif isinstance(message, InRing):
            for ticket, positions in message.positions.items():
                if ticket in self._ordered:
                    self._ordered[ticket].positions |= positions
        elif isinstance(message, Freed):
            self._written.discard(message.ticket)
            self._give_all(self._leaving.pop(message.ticket, []))
        else:
            for ticket, count in message.arrived:
                if ticket in self._ordered:
                    self._ordered[ticket].num_arrived = self._unreported.arrived[ticket] = count
            for ticket in message.done:
                if ticket in self._ordered:
                    self._finish(ticket, self._ordered[ticket])
            for ticket in message.failed:
                self._fail(ticket)
            unreachable = [ticket for ticket in message.unreachable if ticket in self._ordered]
            self._unreported.unreachable += unreachable
            for ticket in unreachable:  # its process may have ended, whose memory the device keeps while it is open
                self._drop_ring(self._ordered[ticket].peer)

    def _use_ring(self, found: FoundRing) -> None:
        """Open a ring for the next fetches from this peer, in place of an earlier one. It is tried once."""
        ordered = self._ordered.get(found.ticket)
        if ordered is None:
            return
        known = self._rings.get(ordered.peer)
        if known is None or known.facts != found.ring:
            self._drop_ring(ordered.peer)
            is_open = self._is_open(found.ring) or self._open_ring(found.ring)
            self._rings[ordered.peer] = _PeerRing(found.ring, is_open)

    def _usable_ring(self, peer: tuple[str, int]) -> bytes:
        """Return the id of the ring in which a fetch may leave its entries; b"" if there is none."""
        ring = self._rings.get(peer)
        if ring is None or not ring.is_open or not self.shares_memory or time.monotonic() < ring.avoided_until_s:
            return b""
        return ring.facts.ring_id

    def _drop_ring(self, peer: tuple[str, int]) -> None:
        dropped = self._rings.pop(peer, None)
        if dropped is not None and dropped.is_open and not self._is_open(dropped.facts):
            self._close_ring(dropped.facts.ring_id)

    def _is_open(self, facts: RingFacts) -> bool:
        """Return whether a ring is open for a peer, which may have several addresses."""
        return any(ring.is_open and ring.facts == facts for ring in self._rings.values())

    def _finish(self, ticket: int, ordered: _Ordered) -> None:
        ordered.num_arrived, ordered.is_reported = len(ordered.buffers), True
        self._unreported.done.append(ticket)

    def _fail(self, ticket: int) -> None:
        """Report that a fetch has failed, once."""
        ordered = self._ordered.get(ticket)
        if ordered is not None and not ordered.is_reported:
            ordered.is_reported = True
            self._unreported.failed.append(ticket)

    def _revive(self) -> bool:
        """Start the process if it does not run. Returns whether it runs."""
        if self._child is not None and self._child.has_ended:
            self._lose_child()
        if self._child is None:
            try:
                self._child = _Child(self._identity)
            except OSError as error:
                LOGGER.warning("the process that fetches prompts cannot be started; they are computed: %s", error)
        return self._child is not None

    def _send(self, message: Start | Forget) -> None:
        assert self._child is not None
        with contextlib.suppress(OSError):  # it has ended; `next_report` notices, and alone closes what it reads from
            self._child.connection.send(message)

    def _lose_child(self) -> None:
        """Let the fetches of a process that has ended fail, also with all their entries: they may still be wrong."""
        assert self._child is not None
        with contextlib.suppress(EOFError, OSError):  # what it has sent still counts
            while self._child.connection.poll():
                self._take(self._child.connection.recv())
        self._child.close()
        self._child = None
        lost = [ticket for ticket in self._written if ticket in self._ordered and not self._ordered[ticket].is_reported]
        LOGGER.warning(
            "the process that fetches prompts has ended; the next fetch starts another; %d prompts are computed",
            len(lost),
        )
        for ticket in lost:
            self._fail(ticket)
        self._written.clear()
        for buffers in self._leaving.values():
            self._give_all(buffers)
        self._leaving.clear()

    def _give_all(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            self.give(buffer)

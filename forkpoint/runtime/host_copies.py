"""Copies between the arena and the host tier's memory: at once, or on streams beside the device's steps."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.disk_entries import HOST_READY, TierNews
from forkpoint.cache.layout import CacheLayout
from forkpoint.platforms.platform import CopyStream, Mark, Platform
from forkpoint.runtime.units import unit_bytes, unit_extent
from forkpoint.sched.plan import Move, MoveKind, MoveRoute

Log: TypeAlias = Callable[[int, str], None]  # takes a level of `logging` and a line

BATCH_BYTES: Final = 32 * 2**20  # that are issued and reported together, so that arrivals and further reads overlap
POLL_S: Final = 0.0002  # between looks at copies that a step without work waits for
# Bytes. Pinning takes about 0.1 s a GiB, and other calls of the driver may wait for a piece.
PINNED_AT_ONCE: Final = 1 << 26


def no_log(level: int, line: str) -> None:
    """Drop a line for the log."""


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The bytes of the arena and of the host tier, which have the same layout.

    `places` has the stride and the bytes of a unit. They are kept because a long prefix has hundreds of units.
    """

    arena: Tensor
    host: Tensor
    page_bytes: int
    places: Mapping[MoveKind, tuple[int, int]]

    @classmethod
    def of(cls, layout: CacheLayout, arena: Tensor, host: Tensor) -> TierMemory:
        kinds = [MoveKind.SLOT, *([MoveKind.BLOCK] if layout.groups else [])]
        places = {kind: (unit_extent(layout, kind, 1).start, unit_bytes(layout, kind)) for kind in kinds}
        return cls(arena, host, layout.page_bytes, places)

    def in_arena(self, move: Move, unit: int) -> Tensor:
        return self.arena[self._extent(move, unit)]

    def in_host(self, move: Move, unit: int) -> Tensor:
        return self.host[self._extent(move, unit)]

    def _extent(self, move: Move, unit: int) -> slice:
        stride, num_bytes = self.places[move.kind]
        return slice(unit * stride, unit * stride + num_bytes)

    def host_page(self, move: Move, unit: int) -> int:
        """Return the page of a unit, which may have held units of the other kind."""
        return unit * self.places[move.kind][0] // self.page_bytes


class HostCopies(ABC):
    """Runs the moves of a plan that concern the host tier, in their order, between the arena's other moves."""

    def start(self, log: Log = no_log) -> None:
        """Prepare the host's memory in the background. Call it once, when nothing else of the device is prepared."""
        return

    @abstractmethod
    def run(self, move: Move) -> bool:
        """Run a move. Returns False if it is of no concern here."""

    def issue(self) -> None:
        """Issue what `run` has only noted. Call it after the last move of a plan."""
        return

    def news(self, wait_s: float = 0.0) -> TierNews | None:
        """Return the tickets that were done since the last call; None if there are none.

        With `wait_s`, wait so long for the first one.
        """
        return None

    def close(self) -> None:
        """End all copies."""
        return


class DirectCopies(HostCopies):
    """Copies at once. For a device that works on the host's memory."""

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory

    def run(self, move: Move) -> bool:
        memory = self._memory
        if move.route is MoveRoute.STORE:
            memory.in_host(move, move.dst).copy_(memory.in_arena(move, move.src))
        elif move.route is MoveRoute.LOAD:
            memory.in_arena(move, move.dst).copy_(memory.in_host(move, move.src))
        elif move.route is MoveRoute.HOST:
            memory.in_host(move, move.dst).copy_(memory.in_host(move, move.src))
        else:
            return False
        return True


@dataclass(slots=True)
class CopyBatch:
    """Copies that were issued together. Their tensors stay alive until `mark`, the point after the last copy."""

    tickets: list[int] = field(default_factory=list)
    pages: set[int] = field(default_factory=set)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # target and source
    num_bytes: int = 0
    after: list[Mark] = field(default_factory=list)
    mark: Mark | None = None


class CopyLane:
    """One direction of copies: a stream, the batch under construction, and the batches that run."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.next = CopyBatch()
        self._running: deque[CopyBatch] = deque()
        self._last: dict[int, CopyBatch] = {}  # page of the host -> the last batch that uses it

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def add(self, target: Tensor, source: Tensor, page: int, ticket: int = 0) -> None:
        self.next.copies.append((target, source))
        self.next.num_bytes += source.numel()
        self.next.pages.add(page)
        if ticket:
            self.next.tickets.append(ticket)

    def issue(self, other: CopyLane) -> CopyBatch:
        """Issue the batch under construction. It waits for what the other lane does with its pages."""
        batch, self.next = self.next, CopyBatch()
        marks = {id(each): each for page in batch.pages if (each := other.mark_of(page)) is not None}
        for mark in (*batch.after, *marks.values()):
            self.stream.wait_for(mark)
        self.stream.copy(batch.copies)
        batch.mark = self.stream.mark()
        self._running.append(batch)
        self._last.update(dict.fromkeys(batch.pages, batch))
        return batch

    def mark_of(self, page: int) -> Mark | None:
        """Return the mark after the last copy to or from a page; None if there is none in flight."""
        batch = self._last.get(page)
        return None if batch is None else batch.mark

    def take_done(self) -> list[int]:
        """Return the tickets of the batches that have ended since the last call."""
        tickets: list[int] = []
        while self._running and (mark := self._running[0].mark) is not None and mark.query():
            batch = self._running.popleft()
            tickets += batch.tickets
            for page in batch.pages:
                if self._last[page] is batch:
                    del self._last[page]
        return tickets


class StreamCopies(HostCopies):
    """Copies on two streams of the device, one for each direction, beside its steps.

    A stored unit is first copied to a buffer of the device, in the order of the device's work. Its memory can be
    overwritten from then on, and nothing waits for the copy to the host. A fetched unit goes to a buffer of the device
    too. It is reported once it has arrived, and only then does a plan copy it to the arena. Copies of one host page
    keep their order. The host's memory is pinned in the background, and HOST_READY is reported when that is done.
    """

    def __init__(self, memory: TierMemory, platform: Platform) -> None:
        self._memory, self._platform = memory, platform
        self._out, self._in = (CopyLane(platform.copy_stream()) for _ in range(2))
        self._fetched: dict[int, Tensor] = {}  # by ticket
        self._left = torch.empty(0, dtype=torch.uint8)  # of the buffer that was allocated last
        self._done: list[int] = []  # tickets of copies that were made at once
        self._is_closing = False
        self._num_pinned_bytes = 0
        self._ready = threading.Event()
        self._pinning: threading.Thread | None = None

    def start(self, log: Log = no_log) -> None:
        self._pinning = threading.Thread(target=self._pin, args=(log,), name="pin host tier", daemon=True)
        self._pinning.start()

    def run(self, move: Move) -> bool:
        memory = self._memory
        if move.route is MoveRoute.STORE:
            self._store(move, memory.in_arena(move, move.src))
        elif move.route is MoveRoute.FETCH:
            self._fetched[move.ticket] = self._fetch(move)
        elif move.route is MoveRoute.HOST:
            self._compact(move)
        elif move.ticket not in self._fetched:
            return False
        elif move.route is MoveRoute.LAND:
            buffer = self._fetched.pop(move.ticket)
            memory.in_arena(move, move.dst).copy_(buffer)
            self._in.stream.release(buffer)
        else:
            assert move.route is MoveRoute.DISCARD
            del self._fetched[move.ticket]
        return True

    def issue(self) -> None:
        if self._out.next.copies:
            self._issue_out()
        if self._in.next.copies:
            self._in.issue(self._out)

    def news(self, wait_s: float = 0.0) -> TierNews | None:
        until = time.monotonic() + wait_s
        while True:
            done = self._done + self._out.take_done() + self._in.take_done()
            self._done = []
            if self._ready.is_set():
                self._ready.clear()
                done.append(HOST_READY)
            if done:
                return TierNews(tuple(done))
            if not self._in.is_busy or time.monotonic() >= until:
                return None
            time.sleep(POLL_S)

    def close(self) -> None:
        self._is_closing = True
        if self._pinning is not None:
            self._pinning.join()
        self._platform.synchronize()
        for start in range(0, self._num_pinned_bytes, PINNED_AT_ONCE):
            self._platform.unpin(self._memory.host[start:])

    def _store(self, move: Move, unit: Tensor) -> None:
        target, page = self._memory.in_host(move, move.dst), self._memory.host_page(move, move.dst)
        self._keep_order(self._in, page)
        try:
            buffer = unit.clone()
        except torch.OutOfMemoryError:
            self._wait_for_all()
            target.copy_(unit)
            self._done.append(move.ticket)
            return
        self._out.add(target, buffer, page, move.ticket)
        if self._out.next.num_bytes >= BATCH_BYTES:
            self.issue()

    def _fetch(self, move: Move) -> Tensor:
        """Start to copy a unit of the host to a buffer, and return the buffer."""
        source, page = self._memory.in_host(move, move.src), self._memory.host_page(move, move.src)
        self._keep_order(self._out, page)
        try:
            buffer = self._buffer(source.numel())
        except torch.OutOfMemoryError:
            self._wait_for_all()
            self._done += [move.ticket] if move.ticket else []
            return source.clone()
        self._in.add(buffer, source, page, move.ticket)
        if self._in.next.num_bytes >= BATCH_BYTES:
            self.issue()
        return buffer

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the device for a fetched unit. It is allocated for many units at once."""
        if len(self._left) < num_bytes:
            self._left = self._in.stream.buffer(max(num_bytes, BATCH_BYTES))
        buffer, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return buffer

    def _compact(self, move: Move) -> None:
        """Move a unit of the host through a buffer of the device: the host's processor would hold up the steps."""
        buffer = self._fetch(move)
        self.issue()
        arrived, page = self._in.mark_of(self._memory.host_page(move, move.src)), self._memory.host_page(move, move.dst)
        if arrived is not None:
            self._out.next.after.append(arrived)
        self._out.add(self._memory.in_host(move, move.dst), buffer, page)

    def _keep_order(self, lane: CopyLane, page: int) -> None:
        """Issue what a lane has to do with a page before the other lane uses the page."""
        if page in lane.next.pages:
            self.issue()

    def _issue_out(self) -> None:
        self._out.next.after.append(self._platform.mark())  # the buffers are filled by then
        self._out.issue(self._in)

    def _wait_for_all(self) -> None:
        """Wait for all copies, because the device has no memory for a buffer. The next one is made at once."""
        self.issue()
        self._platform.synchronize()

    def _pin(self, log: Log) -> None:
        host, start_s = self._memory.host, time.monotonic()
        try:
            for start in range(0, len(host), PINNED_AT_ONCE):
                if self._is_closing:
                    return
                self._platform.pin(host[start : start + PINNED_AT_ONCE])
                self._num_pinned_bytes = min(len(host), start + PINNED_AT_ONCE)
        except RuntimeError as error:
            pinned = f"{self._num_pinned_bytes} of its {len(host)} bytes"
            log(logging.WARNING, f"the host tier is off: the system pins only {pinned}: {error}")
            return
        log(logging.INFO, f"host tier: {len(host)} bytes pinned in {time.monotonic() - start_s:.1f} s")
        self._ready.set()

"""Copies between the arena and the host tier's memory: at once, or on streams next to the device's steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import HOST_READY, TierReport
from forkpoint.platforms.copy_stream import copy_all
from forkpoint.platforms.platform import EVENT_POLL_S, Platform
from forkpoint.runtime.copy_lane import CopyBatch, CopyLane
from forkpoint.runtime.device_buffers import DeviceBuffers
from forkpoint.runtime.stretch import Stretch, are_apart, joined, joint_padding
from forkpoint.runtime.units import unit_bytes, unit_extent
from forkpoint.sched.plan import Move, MoveKind, MoveRoute

Log: TypeAlias = Callable[[int, str], None]  # takes a level of `logging` and a line

BATCH_BYTES: Final = 32 * 2**20  # issued and reported together, so that arrivals and further reads overlap
# Bytes. Pinning takes about 0.1 s a GiB, and other calls of the driver may wait for a piece.
PINNED_AT_ONCE: Final = 1 << 26


def no_log(level: int, line: str) -> None:
    """Drop a line for the log."""


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The bytes of the arena and of the host tier.

    A unit of a tier is one stretch. In the arena the blocks of a state's windows are units of their own. `arena_places`
    and `places` have the stride and the bytes of a unit of the arena and of a tier. They are kept because a long prefix
    has hundreds of units. `windows` has the stride and the bytes of a block of each window in the arena, and where the
    window's first block begins in a slot of a tier.
    """

    arena: Tensor
    host: Tensor
    page_bytes: int  # of the host tier
    arena_places: Mapping[MoveKind, tuple[int, int]]
    places: Mapping[MoveKind, tuple[int, int]]
    windows: tuple[tuple[int, int, int], ...]
    padding: int  # bytes after a block, of the arena and of a tier, that copies may write

    @classmethod
    def of(cls, layout: CacheLayout, arena: Tensor, host: Tensor) -> TierMemory:
        stored, windows, start = layout.in_tiers(), list[tuple[int, int, int]](), layout.slot_bytes
        for group in layout.windows:
            windows.append((group.stride_bytes, group.unit_bytes, start))
            start += group.most_of_state * group.unit_bytes
        arena_places, places = _places(layout), _places(stored)
        sizes = [num_bytes for _, num_bytes in (*arena_places.values(), *places.values())]
        sizes += [num_bytes for _, num_bytes, _ in windows]
        padding = joint_padding(arena_places.get(MoveKind.BLOCK), places.get(MoveKind.BLOCK), min(filter(None, sizes)))
        return cls(arena, host, stored.page_bytes, arena_places, places, tuple(windows), padding)

    def unit_bytes(self, kind: MoveKind) -> int:
        """Return the bytes of a unit of a tier, which holds a unit of the arena and the blocks of its windows."""
        return self.places[kind][1]

    def copy_out(self, move: Move, target: Tensor) -> None:
        """Copy the unit `move.src` of the arena to memory of a tier's unit. Bytes that a short prefix lacks are 0."""
        for part, piece in self.copies_out(move, Stretch.of(target)):
            part.bytes.copy_(piece.bytes)

    def copies_out(self, move: Move, target: Stretch) -> Iterator[tuple[Stretch, Stretch]]:
        """Yield the copies (target, source) of the unit `move.src` of the arena to memory of a tier's unit.

        If a prefix is too short to fill it, the memory is set to zeros first.
        """
        pieces = self._pieces(move, move.src)
        if sum(piece.num_bytes for piece, _ in pieces) < target.num_bytes:
            target.bytes.zero_()
        for piece, start in pieces:
            begin = target.start + start
            yield Stretch(target.memory, begin, begin + piece.num_bytes), piece

    def copy_in(self, move: Move, source: Tensor) -> None:
        """Copy a tier's unit to the unit `move.dst` of the arena, in the order of the device's work."""
        for target, part in self.copies_in(move, Stretch.of(source)):
            target.bytes.copy_(part.bytes, non_blocking=True)

    def copies_in(self, move: Move, source: Stretch) -> list[tuple[Stretch, Stretch]]:
        """Return the copies (target, source) of a tier's unit to the unit `move.dst` of the arena."""
        memory, begin, _ = source
        return [
            (piece, Stretch(memory, begin + start, begin + start + piece.num_bytes))
            for piece, start in self._pieces(move, move.dst)
        ]

    def _pieces(self, move: Move, unit: int) -> list[tuple[Stretch, int]]:
        """Return the parts of a unit of the arena, each with its place in a unit of a tier."""
        stride, num_bytes = self.arena_places[move.kind]
        pieces = [(Stretch(self.arena, unit * stride, unit * stride + num_bytes), 0)] if num_bytes else []
        if move.kind is MoveKind.SLOT:
            for (stride, num_bytes, start), blocks in zip(self.windows, move.windows, strict=True):
                for index, block in enumerate(blocks):
                    own = Stretch(self.arena, block * stride, block * stride + num_bytes)
                    pieces.append((own, start + index * num_bytes))
        return pieces

    def in_host(self, move: Move, unit: int) -> tuple[Stretch, int]:
        """Return the place of a unit, and its page, which may have held units of the other kind."""
        stride, num_bytes = self.places[move.kind]
        start = unit * stride
        return Stretch(self.host, start, start + num_bytes), start // self.page_bytes


def _places(layout: CacheLayout) -> dict[MoveKind, tuple[int, int]]:
    kinds = [MoveKind.SLOT, *([MoveKind.BLOCK] if layout.has_kv else [])]
    return {kind: (unit_extent(layout, kind, 1).start, unit_bytes(layout, kind)) for kind in kinds}


class DirectCopies:
    """Runs the moves of a plan that concern the host tier, in their order, between the arena's other moves.

    It copies at once. For a device that works on the host's memory.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory

    def start(self, log: Log = no_log) -> None:
        """Prepare the host's memory in the background. Call it once, when nothing else of the device is prepared."""
        return

    def run(self, move: Move) -> bool:
        """Run a move that no other method runs. Returns False if it is of no concern here."""
        memory = self._memory
        if move.route is MoveRoute.LOAD:
            memory.copy_in(move, memory.in_host(move, move.src)[0].bytes)
        elif move.route is MoveRoute.HOST:
            (target, _), (source, _) = (memory.in_host(move, unit) for unit in (move.dst, move.src))
            target.bytes.copy_(source.bytes)
        else:
            return False
        return True

    def store(self, moves: Sequence[Move]) -> None:
        """Run moves of the route STORE."""
        for move in moves:
            self._memory.copy_out(move, self._memory.in_host(move, move.dst)[0].bytes)

    def load_to_buffer(self, moves: Sequence[Move]) -> None:
        """Run moves of the route LOAD_TO_BUFFER."""
        raise NotImplementedError(f"{type(self).__name__} loads units without a buffer in between")

    def land(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Run moves of the route LAND, and return the moves of other copies."""
        return moves

    def fill(self) -> None:
        """Make the copies from the arena that were only noted. Call it before anything else may write there."""
        return

    def issue(self) -> None:
        """Issue the copies that `run` has only noted. Call it after the last move of a plan."""
        return

    def next_report(self, wait_s: float = 0.0) -> TierReport | None:
        """Return the tickets that were done since the last call; None if there are none. Wait at most `wait_s`."""
        return None

    def close(self) -> None:
        """End all copies."""
        return


class StreamCopies(DirectCopies):
    """Copies on two streams of the device, one for each direction, next to its steps.

    A stored unit is first copied to a buffer of the device, in the order of the device's work. Its memory can be
    overwritten from then on, and nothing waits for the copy to the host. A loaded unit goes to a buffer of the device
    too. It is reported once it has arrived, and only then does a plan copy it to the arena. Copies of one host page
    keep their order. The host's memory is pinned in the background, and HOST_READY is reported when that is done.
    """

    def __init__(self, memory: TierMemory, platform: Platform) -> None:
        super().__init__(memory)
        self._platform = platform
        self._out, self._in = (CopyLane(platform.copy_stream(), memory.padding) for _ in range(2))
        self._loaded: dict[int, Stretch] = {}  # by ticket
        self._buffers_in, self._buffers_out = (DeviceBuffers(BATCH_BYTES, memory.padding) for _ in range(2))
        self._unfilled: list[tuple[Stretch, Stretch]] = []  # copies from the arena to buffers that are not issued yet
        self._unfilled_on_device: list[tuple[Stretch, Stretch]] = []  # the same to other memory of the device
        self._done: list[int] = []  # tickets of copies that were made at once
        self._lost: list[int] = []  # tickets of copies whose source was lost
        self._is_closing = False
        self._num_pinned_bytes = 0
        self._ready = threading.Event()
        self._pinning: threading.Thread | None = None

    def start(self, log: Log = no_log) -> None:
        if not len(self._memory.host):
            return
        self._pinning = threading.Thread(target=self._pin, args=(log,), name="pin host tier", daemon=True)
        self._pinning.start()

    def run(self, move: Move) -> bool:
        if move.route is MoveRoute.HOST:
            # The host's processor would hold up the steps.
            self.copy_from_host(move, *self._memory.in_host(move, move.dst))
        elif move.ticket not in self._loaded:
            return False
        else:
            assert move.route is MoveRoute.DISCARD
            del self._loaded[move.ticket]
        return True

    def store(self, moves: Sequence[Move]) -> None:
        placed = [(move, *self._memory.in_host(move, move.dst)) for move in moves]
        if are_apart(target for _, target, _ in placed):  # the tier may store in the same place again
            placed.sort(key=lambda each: each[1].start)  # neighbours are one copy
        for move, target, page in placed:
            self._keep_order(self._in, page)
            if self.copy_out(move, target, page, move.ticket) is None:
                self._done.append(move.ticket)

    def load_to_buffer(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._loaded[move.ticket] = self._load_to_buffer(move, move.ticket)

    def land(self, moves: Sequence[Move]) -> Sequence[Move]:
        own = [move for move in moves if move.ticket in self._loaded]
        others = [move for move in moves if move.ticket not in self._loaded]
        arrived = (copy for move in own for copy in self._memory.copies_in(move, self._loaded.pop(move.ticket)))
        for buffer in self._copy_now(arrived):
            self._in.stream.release(buffer)
        return others

    def _copy_now(self, copies: Iterable[tuple[Stretch, Stretch]]) -> list[Tensor]:
        """Copy between the arena and other memory of the device, in the order of its work, and return the sources.

        If two copies have targets in one place, the last one stays.
        """
        pairs = list(joined(copies, self._memory.padding))
        targets, sources = [target.bytes for target, _ in pairs], [source.bytes for _, source in pairs]
        if are_apart(target for target, _ in pairs):
            copy_all(targets, sources)
        else:
            for target, source in zip(targets, sources, strict=True):
                copy_all([target], [source])
        return sources

    def issue(self) -> None:
        if self._out.next.copies:
            self._issue_out()
        if self._in.next.copies:
            self._in.issue(self._out)

    def next_report(self, wait_s: float = 0.0) -> TierReport | None:
        until = time.monotonic() + wait_s
        while True:
            done, lost = self._in.take_done()
            done += self._done + self._out.take_done()[0]
            lost += self._lost
            self._done, self._lost = [], []
            if self._ready.is_set():
                self._ready.clear()
                done.append(HOST_READY)
            if done or lost:
                return TierReport(tuple(done), tuple(lost))
            if not self._in.is_busy or time.monotonic() >= until:
                return None
            time.sleep(EVENT_POLL_S)

    def close(self) -> None:
        self._is_closing = True
        if self._pinning is not None:
            self._pinning.join()
        self._platform.synchronize()
        for start in range(0, self._num_pinned_bytes, PINNED_AT_ONCE):
            self._platform.unpin(self._memory.host[start:])

    def copy_out(self, move: Move, target: Stretch, page: int | None = None, ticket: int = 0) -> CopyBatch | None:
        """Copy the unit `move.src` of the arena to memory of the host, which may be `page` of the tier.

        `fill` copies it to a buffer first. Return the batch of the copy, which `issue` starts; None if the copy is done
        already.
        """
        num_bytes = self._memory.unit_bytes(move.kind)
        try:
            buffer = self._buffers_out.take(num_bytes, self._new_buffer)
        except torch.OutOfMemoryError:
            self.fill()
            self._wait_for_all()
            self._memory.copy_out(move, target.bytes)
            return None
        self._unfilled += self._memory.copies_out(move, buffer)
        batch = self._out.add(target, buffer, page, ticket)
        if self._out.next.num_bytes >= BATCH_BYTES:
            self.issue()
        return batch

    def _new_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.arena.device)

    def copy_on_device(self, move: Move, target: Stretch) -> None:
        """Copy the unit `move.src` of the arena to other memory of the device.

        Call `copy_out` of the unit next: when its copy has ended, this one has, too.
        """
        self._unfilled_on_device += self._memory.copies_out(move, target)

    def fill(self) -> None:
        for unfilled in (self._unfilled, self._unfilled_on_device):
            self._copy_now(unfilled)
        self._unfilled, self._unfilled_on_device = [], []

    def copy_in(self, source: Stretch, ticket: int, check: Callable[[], bool] | None = None) -> CopyBatch | None:
        """Copy contents from other memory to a buffer that LAND finds under the ticket.

        `next_report` reports the ticket when they have arrived. If `check` then returns False, they are reported as
        failed. Returns as `copy_out` does.
        """
        self._loaded[ticket], batch = self._copy_in(source, None, ticket, check)
        return batch

    def lose(self, ticket: int) -> None:
        """Report that the source of a ticket is not there."""
        self._loaded[ticket] = Stretch.of(torch.empty(0, dtype=torch.uint8))
        self._lost.append(ticket)

    def _copy_in(
        self, source: Stretch, page: int | None, ticket: int, check: Callable[[], bool] | None = None
    ) -> tuple[Stretch, CopyBatch | None]:
        """Copy other memory to a buffer, and return the buffer and what `copy_out` returns.

        The buffer is in the host's memory if the device has none left.
        """
        try:
            buffer = self._buffers_in.take(source.num_bytes, self._in.stream.buffer)
        except torch.OutOfMemoryError:
            self._wait_for_all()
            found = Stretch.of(torch.empty(source.num_bytes, dtype=torch.uint8).copy_(source.bytes))
            if ticket:
                (self._done if check is None or check() else self._lost).append(ticket)
            return found, None
        batch = self._in.add(buffer, source, page, ticket)
        if check is not None:
            batch.checks[ticket] = check
        return buffer, batch

    def _load_to_buffer(self, move: Move, ticket: int = 0) -> Stretch:
        """Start to copy a unit of the host to a buffer, and return the buffer."""
        source, page = self._memory.in_host(move, move.src)
        self._keep_order(self._out, page)
        buffer, _ = self._copy_in(source, page, ticket)
        if self._in.next.num_bytes >= BATCH_BYTES:
            self.issue()
        return buffer

    def copy_from_host(self, move: Move, target: Stretch, page: int | None = None) -> CopyBatch:
        """Copy the unit `move.src` of the host tier to other memory of the host, which may be `page` of the tier."""
        buffer = self._load_to_buffer(move)
        self.issue()
        arrived = self._in.event_of(self._memory.in_host(move, move.src)[1])
        if arrived is not None:
            self._out.next.after.append(arrived)
        return self._out.add(target, buffer, page)

    def _keep_order(self, lane: CopyLane, page: int) -> None:
        """Issue a lane's copies of a page before the other lane uses the page."""
        if page in lane.next.pages:
            self.issue()

    def _issue_out(self) -> None:
        self.fill()
        batch = self._out.next
        batch.filled = self._platform.record_event()
        batch.after.append(batch.filled)
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

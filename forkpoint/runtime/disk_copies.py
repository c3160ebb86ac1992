"""Copies between a worker's memory and its disk tier: at once, or on streams next to the device's steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName, TierReport
from forkpoint.disk.store import DiskStore
from forkpoint.runtime.after_copies import AfterCopies, AtOnce
from forkpoint.runtime.copy_lane import CopyBatch
from forkpoint.runtime.host_copies import StreamCopies, TierMemory
from forkpoint.runtime.pinned import PinnedBuffers, as_tensor
from forkpoint.runtime.stretch import Stretch
from forkpoint.sched.plan import Move, MoveKind, MoveRoute


class DirectDisk:
    """Hands a plan's moves to the disk's thread. For a device that works on the host's memory."""

    def __init__(self, memory: TierMemory, disk: DiskStore) -> None:
        self._memory, self._disk = memory, disk
        self._after_copies = AtOnce()

    def run(self, move: Move, sound: bool) -> None:
        """Run a move that concerns the disk. Unless the memory is `sound`, writes fail."""
        disk, route, name = self._disk, move.route, move.name
        if route is MoveRoute.LAND:
            kind, buffer = disk.take(move.ticket)
            self._memory.copy_in(move, as_tensor(buffer))
            disk.give_back(kind, buffer)
        elif route is MoveRoute.READ:
            assert name is not None
            self._after_copies.add(partial(disk.submit_read, name, move.src, move.ticket))
        elif route is MoveRoute.DISCARD:
            self._after_copies.add(partial(disk.discard, move.ticket))
        elif route is MoveRoute.REMOVE:
            self._after_copies.add(partial(disk.submit_removal, name))
        elif route is MoveRoute.DISK:
            kind = BLOCK if move.kind is MoveKind.BLOCK else SLOT
            self._after_copies.add(partial(disk.submit_copy, kind, move.src, move.dst))
        elif not sound:
            self._after_copies.add(partial(disk.fail_write, move.ticket))
        else:
            assert name is not None
            self._write(move, name)

    def _write(self, move: Move, name: EntryName) -> None:
        buffer, memory = self._disk.buffer(name.kind), self._memory
        target = as_tensor(buffer)[: memory.unit_bytes(move.kind)]
        if move.route is MoveRoute.HOST_TO_DISK:
            target.copy_(memory.in_host(move, move.src)[0].bytes)
        else:
            memory.copy_out(move, target)
        self._disk.submit_write(name, move.dst, buffer, move.ticket)

    def issue(self) -> None:
        """Begin the work that `run` has only noted. Call it after the last move of a plan."""
        self._after_copies.flush()

    def next_report(self, wait_s: float) -> TierReport | None:
        """Return the disk's next report; None if nothing ended since the last one. Wait at most `wait_s` for it."""
        return self._disk.next_report(wait_s)

    def close(self) -> None:
        """Finish all writes and close the disk. All copies of the device must be done."""
        self._after_copies.close()
        self._disk.close()


class StreamedDisk(DirectDisk):
    """Copies units of a device on the streams of `copies`, to and from buffers that the disk reads and writes.

    The disk's work keeps the order of the moves: work after a write waits for the write's copy. Contents that were
    read go on to the device at once. They are reported when they are there, and LAND is then a move of `copies`.
    """

    def __init__(self, memory: TierMemory, disk: DiskStore, copies: StreamCopies, pinned: PinnedBuffers) -> None:
        super().__init__(memory, disk)
        self._copies = copies
        self._after_copies = AfterCopies("disk copies")
        self._reading: set[int] = set()  # tickets of reads whose contents are wanted
        disk.allocate = pinned.allocate

    def run(self, move: Move, sound: bool) -> None:
        if move.route is MoveRoute.READ:
            self._reading.add(move.ticket)
        elif move.route is MoveRoute.DISCARD:
            self._reading.discard(move.ticket)
        super().run(move, sound)

    def _write(self, move: Move, name: EntryName) -> None:
        buffer = self._disk.buffer(name.kind)
        target = Stretch(as_tensor(buffer), 0, self._disk.unit_bytes(name.kind))
        batch: CopyBatch | None
        if move.route is MoveRoute.HOST_TO_DISK:
            batch = self._copies.copy_from_host(move, target)
        else:
            batch = self._copies.copy_out(move, target)
        self._after_copies.add(partial(self._disk.submit_write, name, move.dst, buffer, move.ticket), batch)

    def next_report(self, wait_s: float) -> TierReport | None:
        found = super().next_report(wait_s)
        if found is None:
            return None
        arrived = [ticket for ticket in found.done if ticket in self._reading]
        for ticket in arrived:
            kind, buffer = self._disk.take(ticket)
            contents = as_tensor(buffer)[: self._disk.unit_bytes(kind)]
            batch = self._copies.copy_in(Stretch.of(contents), ticket)
            self._after_copies.add(partial(self._disk.give_back, kind, buffer), batch)
        if arrived:
            self._copies.issue()
            self._after_copies.flush()
        others = tuple(ticket for ticket in found.done if ticket not in self._reading)
        self._reading.difference_update(found.done, found.failed)
        if not others and not found.failed:
            return None
        return replace(found, done=others)

"""Entries that a prefill engine offers: copies, held under leases until they are fetched or time is up."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.protocol import part_of, part_sum
from forkpoint.peer.ring import Ring
from forkpoint.shared_arrays import Place, place_of

Buffer: TypeAlias = bytes | memoryview
MOST_ENDED: Final = 4096  # leases that have ended and are remembered, so that nobody waits for them


@dataclass(slots=True, eq=False)
class OfferedEntry:
    """An entry's bytes, held by leases and by connections that send them.

    `position` is set if the bytes were also written to the ring. `is_copied`: `data` has them, and nobody may change
    it any more. `place` is that of `data` in shared memory. `sums` has the checksums of parts that were fetched.
    """

    name: EntryName
    data: Buffer
    position: int | None = None
    is_copied: bool = False
    is_dropped: bool = False
    num_holders: int = 0
    place: Place | None = field(init=False, default=None)
    sums: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.data, memoryview):
            self.place = place_of(np.frombuffer(self.data, np.uint8))


@dataclass(slots=True)
class _Lease:
    until_s: float = 0.0
    entries: dict[bytes, OfferedEntry] = field(default_factory=dict)
    is_complete: bool = False  # no more entries come


class Offered:
    """Holds at most `max_bytes` for other engines. Prompts that share entries share their copies.

    A lease ends when `end` is called, `lease_s` after its last entry was added, or when newer leases need its room; the
    oldest goes first. The worker's thread adds entries, and the threads of connections read them.
    """

    def __init__(
        self, namespace: bytes, max_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._namespace, self._max_bytes, self._lease_s, self._clock = namespace, max_bytes, lease_s, clock
        self._changed = threading.Condition()  # guards all below
        self.give: Callable[[memoryview], None] = lambda data: None  # takes buffers that are not needed any more
        self.ring: Ring | None = None
        self._entries: dict[bytes, OfferedEntry] = {}
        self._leases: dict[int, _Lease] = {}  # the oldest first
        self._ended: dict[int, None] = {}  # leases, in the order in which they ended
        self.num_bytes = 0

    def add(self, entries: Sequence[OfferedEntry], lease: int) -> None:
        """Add entries to a lease. If the lease alone needs more than `max_bytes`, it ends.

        An entry that is not kept is dropped: its `data` is given back, once it `is_copied`.
        """
        with self._changed:
            for entry in entries:
                if not self._add(entry, lease):
                    self._give(entry)
            self._changed.notify_all()

    def copied(self, entries: Iterable[OfferedEntry]) -> None:
        """Note, once, that entries have their bytes by now. They may be added before or after that."""
        with self._changed:
            for entry in entries:
                entry.is_copied = True
                if entry.is_dropped:
                    self._give(entry)
            self._changed.notify_all()

    def _add(self, new: OfferedEntry, lease: int) -> bool:
        """Add an entry. Returns whether `new` is kept."""
        key = key_of(new.name)
        self._expire()
        held = self._renewed(lease)
        if held is None or key in held.entries:
            return False
        entry = self._entries.get(key)
        if entry is not None and entry.name != new.name:
            entry = None  # their checksums differ
        is_new = entry is None
        if entry is None:
            while self.num_bytes + len(new.data) > self._max_bytes and self._leases:
                self._end(next(iter(self._leases)))
            if lease not in self._leases:
                return False
            entry = self._entries[key] = new
            self.num_bytes += len(new.data)
        entry.position = new.position  # the latest copy in the ring stays longest
        entry.num_holders += 1
        held.entries[key] = entry
        return is_new

    def _renewed(self, lease: int) -> _Lease | None:
        """Return a lease that begins or goes on, with the end of its time set; None if it has ended."""
        if lease in self._ended:
            return None
        held = self._leases.setdefault(lease, _Lease())
        held.until_s = self._clock() + self._lease_s
        return held

    def complete(self, lease: int) -> None:
        """Note that a lease gets no more entries, so that nobody waits for others."""
        with self._changed:
            held = self._renewed(lease)
            if held is not None:
                held.is_complete = True
            self._changed.notify_all()

    def wait_for(self, lease: int, keys: Sequence[bytes], wait_s: float) -> list[OfferedEntry]:
        """Return the first entries of a lease that are asked for, as many as there are, and wait for one of them.

        `sent` has to follow. A decode engine may ask before an entry is computed. Nothing is returned if the first one
        is not added in time, and at once if the lease has ended or is complete without it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed(lease) or self._has(lease, keys[0]), wait_s)
            held = self._leases.get(lease)
            if held is None:
                return []
            wanted = itertools.takewhile(held.entries.__contains__, keys)
            entries = [held.entries[key] for key in wanted]
            for entry in entries:
                entry.num_holders += 1
        return entries

    def wait_until_complete(self, lease: int, wait_s: float) -> bool:
        """Return whether a lease is complete in time. False at once if it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed(lease), wait_s)
            return lease in self._leases and self._leases[lease].is_complete

    def wait_for_copy(self, entry: OfferedEntry, wait_s: float) -> bool:
        """Return whether an entry that `wait_for` returned has its bytes in time."""
        with self._changed:
            return self._changed.wait_for(lambda: entry.is_copied, wait_s)

    def part_sum(self, entry: OfferedEntry, part: int) -> bytes:
        """Return the checksum of a part of an entry. It is computed here because steps would wait for it in `add`."""
        found = entry.sums.get(part)
        if found is None:
            found = part_sum(self._namespace, entry.name, part, part_of(memoryview(entry.data), part))
            entry.sums[part] = found
        return found

    def sent(self, entries: Iterable[OfferedEntry]) -> None:
        """Note that the entries that `wait_for` returned are not needed any more."""
        with self._changed:
            self._drop(entries)

    def _has(self, lease: int, key: bytes) -> bool:
        return lease in self._leases and key in self._leases[lease].entries

    def _is_closed(self, lease: int) -> bool:
        """Return whether a lease gets no more entries."""
        return lease in self._ended or (lease in self._leases and self._leases[lease].is_complete)

    def end(self, lease: int) -> None:
        """Let nobody fetch the entries of a lease any more."""
        with self._changed:
            self._end(lease)
            self._changed.notify_all()

    def withdraw(self, block_hash: bytes | None) -> None:
        """End all leases with an entry of this hash; all leases if none is given."""
        with self._changed:
            for number, lease in list(self._leases.items()):
                if block_hash is None or any(key[1:] == block_hash for key in lease.entries):
                    self._end(number)
            for key in [key for key in self._entries if block_hash is None or key[1:] == block_hash]:
                del self._entries[key]  # a connection sends it; no later lease may share it
            self._changed.notify_all()

    def expire(self) -> None:
        with self._changed:
            self._expire()
            self._changed.notify_all()

    def _expire(self) -> None:
        now = self._clock()
        for number in [number for number, lease in self._leases.items() if lease.until_s < now]:
            self._end(number)

    def _end(self, number: int) -> None:
        self._ended[number] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._drop(lease.entries.values())

    def _drop(self, entries: Iterable[OfferedEntry]) -> None:
        """Lower the counts of holders of these entries by one, and free those that nobody holds."""
        for entry in entries:
            entry.num_holders -= 1
            if entry.num_holders:
                continue
            if self._entries.get(key_of(entry.name)) is entry:
                del self._entries[key_of(entry.name)]
            self.num_bytes -= len(entry.data)
            self._give(entry)

    def _give(self, entry: OfferedEntry) -> None:
        """Drop an entry that nobody holds, and give its memory back unless a copy still writes there."""
        entry.is_dropped = True
        if entry.is_copied and isinstance(entry.data, memoryview):
            self.give(entry.data)


def key_of(name: EntryName) -> bytes:
    """Return the name of an entry in messages: its kind and its hash."""
    return bytes([name.kind]) + name.hash

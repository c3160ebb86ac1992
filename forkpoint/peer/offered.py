"""What a prefill engine offers: copies of entries, held under leases until they are fetched or time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from forkpoint.cache.disk_entries import EntryName
from forkpoint.disk.namespace import entry_sum

GONE: Final = "the lease has ended, or its entries were withdrawn"


@dataclass(slots=True)
class _Entry:
    """An entry's bytes, which `num_leases` hold. Their checksum is computed when they are first fetched."""

    name: EntryName
    data: bytes
    num_leases: int = 0
    sum: bytes = b""


@dataclass(slots=True)
class _Lease:
    until_s: float
    keys: dict[bytes, None] = field(default_factory=dict)


class Offered:
    """Holds at most `max_bytes` for other engines. Prompts that share entries share their copies.

    A lease ends when it was fetched, after `lease_s`, or when newer leases need its room; the oldest goes first. The
    worker's thread adds entries, and the threads of connections read them.
    """

    def __init__(
        self, namespace: bytes, max_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._namespace, self._max_bytes, self._lease_s, self._clock = namespace, max_bytes, lease_s, clock
        self._changed = threading.Condition()  # guards all below
        self._entries: dict[bytes, _Entry] = {}
        self._leases: dict[int, _Lease] = {}  # the oldest first
        self._newest = 0  # lease of which an entry was added, or which had no room
        self.num_bytes = 0

    def add(self, name: EntryName, data: memoryview, lease: int) -> None:
        """Copy an entry for a lease. If even an otherwise empty memory has no room for the lease, the lease ends."""
        key = key_of(name)
        with self._changed:
            self._expire()
            if lease > self._newest:
                self._newest = lease
                self._leases[lease] = _Lease(self._clock() + self._lease_s)
            held = self._leases.get(lease)
            if held is None or key in held.keys:
                return
            entry = self._entries.get(key)
            if entry is None:
                while self.num_bytes + len(data) > self._max_bytes and self._leases:
                    self._end(next(iter(self._leases)))
                if lease not in self._leases:
                    self._changed.notify_all()
                    return
                entry = self._entries[key] = _Entry(name, bytes(data))
                self.num_bytes += len(data)
            entry.num_leases += 1
            held.keys[key] = None
            self._changed.notify_all()

    def wait_for(self, lease: int, keys: Sequence[bytes], wait_s: float) -> list[tuple[bytes, bytes]] | None:
        """Return (bytes, checksum) of each entry of a lease; None if it has ended.

        The offer may be on its way to the client before its copies are made, so wait for them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(lease, keys), wait_s)
            self._expire()
            held = self._leases.get(lease)
            if held is None or not all(key in held.keys for key in keys):
                return None
            entries = [self._entries[key] for key in keys]
        for entry in entries:  # not in the worker's thread, whose steps would wait for it
            entry.sum = entry.sum or entry_sum(self._namespace, entry.name, memoryview(entry.data))
        return [(entry.data, entry.sum) for entry in entries]

    def _is_decided(self, lease: int, keys: Sequence[bytes]) -> bool:
        held = self._leases.get(lease)
        if held is None:
            return lease <= self._newest
        return all(key in held.keys for key in keys)

    def end(self, lease: int) -> None:
        with self._changed:
            self._end(lease)
            self._changed.notify_all()

    def withdraw(self, block_hash: bytes | None) -> None:
        """End all leases with an entry of this hash; all leases if none is given."""
        with self._changed:
            for number, lease in list(self._leases.items()):
                if block_hash is None or any(key[1:] == block_hash for key in lease.keys):
                    self._end(number)

    def expire(self) -> None:
        with self._changed:
            self._expire()

    def _expire(self) -> None:
        now = self._clock()
        for number in [number for number, lease in self._leases.items() if lease.until_s < now]:
            self._end(number)

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        for key in lease.keys:
            entry = self._entries[key]
            entry.num_leases -= 1
            if not entry.num_leases:
                del self._entries[key]
                self.num_bytes -= len(entry.data)


def key_of(name: EntryName) -> bytes:
    """Return what names an entry in messages."""
    return bytes([name.kind]) + name.hash

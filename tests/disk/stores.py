"""A disk store in a folder of small units, filled with entries whose contents follow from their names."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName, TierReport
from forkpoint.disk.slab import SlabLayout
from forkpoint.disk.store import DiskStore, open_store

LAYOUT = SlabLayout(blocks_per_page=2, slots_per_page=3, block_bytes=5000, slot_bytes=1300)
NUM_PAGES = 8
NAMESPACE = b"n" * 16
WAIT_S = 20.0


def opened(folder: Path, namespace: bytes = NAMESPACE, num_pages: int = NUM_PAGES) -> DiskStore | None:
    return open_store(folder, LAYOUT, num_pages * LAYOUT.page_bytes, namespace)


def open_now(folder: Path, namespace: bytes = NAMESPACE, num_pages: int = NUM_PAGES) -> DiskStore:
    store = opened(folder, namespace, num_pages)
    assert store is not None
    return store


def name_of(number: int, kind: int = BLOCK) -> EntryName:
    digest = blake2b(str(number).encode()).digest()
    return EntryName(kind, digest[:16], digest[16:32], 1 + number % 7, origin=number % 3, decoded=number % 2 == 1)


def contents_of(name: EntryName) -> bytes:
    size = LAYOUT.unit_bytes(name.kind)
    return blake2b(name.hash + bytes([name.kind])).digest() * (size // 64) + b"e" * (size % 64)


def write(store: DiskStore, name: EntryName, unit: int, ticket: int) -> None:
    buffer, contents = store.buffer(name.kind), contents_of(name)
    buffer[: len(contents)] = contents
    store.submit_write(name, unit, buffer, ticket)


def settled(store: DiskStore, tickets: set[int]) -> TierReport:
    """Wait until all of these tickets have been reported."""
    done, failed = set[int](), set[int]()
    writes = True
    while not tickets <= done | failed:
        report = store.next_report(WAIT_S)
        assert report is not None, f"nothing is reported of {tickets - done - failed}"
        done.update(report.done)
        failed.update(report.failed)
        writes = report.writes
    return TierReport(tuple(sorted(done)), tuple(sorted(failed)), writes)


def read(store: DiskStore, name: EntryName, unit: int, ticket: int = 10**6) -> bytes | None:
    """Return an entry's bytes; None if the read fails."""
    store.submit_read(name, unit, ticket)
    if ticket in settled(store, {ticket}).failed:
        return None
    kind, buffer = store.take(ticket)
    contents = buffer[: LAYOUT.unit_bytes(name.kind)]
    store.give_back(kind, buffer)
    return contents


def found(store: DiskStore) -> dict[tuple[int, int], EntryName]:
    """Return the entries that the store had when it was opened, by kind and unit."""
    return {
        (int(r["kind"]), int(r["unit"])): EntryName(
            int(r["kind"]),
            r["hash"].tobytes(),
            r["parent"].tobytes(),
            int(r["depth"]),
            int(r["origin"]),
            bool(r["decoded"]),
        )
        for r in store.facts.entries
    }


def count_right(store: DiskStore) -> int:
    """Read all entries that the store found. Returns how many are whole; raises AssertionError for a wrong one."""
    right = 0
    for index, ((_, unit), name) in enumerate(found(store).items()):
        bytes_read = read(store, name, unit, 10**6 + index)
        if bytes_read is not None:
            assert bytes_read == contents_of(name), "other contents were served"
            right += 1
    return right


def random_writes(store: DiskStore, rng: np.random.Generator, count: int, first: int = 0) -> None:
    """Write entries to random units, blocks over slots and the other way round."""
    for ticket in range(1, count + 1):
        kind = int(rng.integers(BLOCK, SLOT + 1))
        per_page = LAYOUT.per_page(kind)
        unit = int(rng.integers(per_page, NUM_PAGES * per_page))
        write(store, name_of(first + ticket, kind), unit, ticket)

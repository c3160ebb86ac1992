"""The disk's side of the disk tier: one thread that reads and writes units, so that no step waits for the disk."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from forkpoint.cache.tier_entries import BLOCK, DAY_S, RECORD, SLOT, DiskFacts, EntryName, Records, TierReport
from forkpoint.disk.folder import lock_file, unlock
from forkpoint.disk.journal import Journal
from forkpoint.disk.namespace import entry_sum
from forkpoint.disk.slab import Slab, SlabLayout

LOCK_WAIT_S: Final = 2.0  # wait for the process of an engine that was just killed
LOGGER: Final = logging.getLogger("forkpoint")


@dataclass(slots=True, eq=False)
class Job:
    """A read, a write, a copy from one unit to another, or the removal of entries.

    Jobs run in their order, except that a read overtakes jobs that do not touch its unit.
    """

    kind: int
    unit: int
    name: EntryName | None = None
    data: mmap.mmap | None = None  # contents of a write, or of a copy once it runs
    reads: bool = False
    removes: bool = False
    source: int | None = None  # the unit that is copied
    ticket: int = 0

    def touches(self, kind: int, unit: int) -> bool:
        return self.removes or (self.kind == kind and unit in (self.unit, self.source))


class DiskStore:
    """Owns a folder's slab and journal, and the thread that uses them.

    `submit_*` methods only queue work. `next_report` says which tickets are done or failed. Contents that were read
    wait in buffers until `take` or `discard`. After an error of a write, or once its files have vanished, nothing is
    written any more, which is logged once. Reads go on. Damaged contents are failed reads, and the first of these is
    logged.
    """

    def __init__(self, journal: Journal, slab: Slab, lock: int, namespace: bytes) -> None:
        """Use `open_store`, which opens these files."""
        self._journal, self._slab, self._lock_fd, self._namespace = journal, slab, lock, namespace
        layout = slab.layout
        self._records = {kind: np.zeros(slab.num_pages * layout.per_page(kind), RECORD) for kind in (BLOCK, SLOT)}
        entries = _fitting(journal.entries, slab)
        if lost := len(journal.entries) - len(entries):
            LOGGER.warning(
                "disk tier: %d of %d entries of earlier runs are not in its file %s, which was cut off or is "
                "smaller now; they are computed again",
                *(lost, len(journal.entries), slab.path),
            )
        for kind, table in self._records.items():
            own = entries[entries["kind"] == kind]
            table[own["unit"]] = own
        self._num_live = len(entries)
        self.facts = DiskFacts(slab.num_pages, entries, journal.window_start_s, journal.window_bytes)
        self.writes = True
        self._has_failed_reads = False
        self.allocate: Callable[[int], mmap.mmap] = partial(mmap.mmap, -1)  # returns memory for a buffer of a size
        self._changed = threading.Condition()  # guards all below
        self._jobs: deque[Job] = deque()
        self._num_reads = 0  # how many of the jobs are reads
        self._buffers: dict[int, list[mmap.mmap]] = {BLOCK: [], SLOT: []}  # idle ones
        self._arrived: dict[int, tuple[int, mmap.mmap]] = {}  # ticket -> kind and contents
        self._discarded: set[int] = set()  # tickets of reads whose contents nobody wants
        self._done, self._failed = list[int](), list[int]()  # tickets for the next `next_report`
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    # --- called by the worker's thread

    def submit_write(self, name: EntryName, unit: int, buffer: mmap.mmap, ticket: int) -> None:
        """Queue the writing of `buffer`, which `buffer()` returned, to `unit` as the entry `name`."""
        self._submit(Job(name.kind, unit, name, buffer, ticket=ticket))

    def submit_read(self, name: EntryName, unit: int, ticket: int) -> None:
        self._submit(Job(name.kind, unit, name, reads=True, ticket=ticket))

    def submit_copy(self, kind: int, source: int, unit: int) -> None:
        """Queue a move of compaction from unit `source` to `unit`."""
        self._submit(Job(kind, unit, source=source))

    def submit_removal(self, name: EntryName | None) -> None:
        """Queue the removal of all entries with the name's hash; of all entries without a name."""
        self._submit(Job(BLOCK, 0, name, removes=True))

    def fail_write(self, ticket: int) -> None:
        """Report as failed a write that the caller does not want."""
        with self._changed:
            self._failed.append(ticket)

    def take(self, ticket: int) -> tuple[int, mmap.mmap]:
        """Return the kind of the unit that was read and the buffer with it, for `give_back`.

        KeyError if the read has not arrived.
        """
        with self._changed:
            return self._arrived.pop(ticket)

    def give_back(self, kind: int, buffer: mmap.mmap) -> None:
        with self._changed:
            self._buffers[kind].append(buffer)

    def unit_bytes(self, kind: int) -> int:
        """Return the bytes of a unit's contents, with which its buffer begins."""
        return self._slab.layout.unit_bytes(kind)

    def discard(self, ticket: int) -> None:
        """Drop the contents of a read, arrived or not."""
        with self._changed:
            if ticket in self._arrived:
                kind, buffer = self._arrived.pop(ticket)
                self._buffers[kind].append(buffer)
            else:
                self._discarded.add(ticket)

    def next_report(self, wait_s: float = 0.0) -> TierReport | None:
        """Return the tickets that were done or failed since the last call; None if there are none.

        Wait at most `wait_s` for the first one.
        """
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: self._done or self._failed, wait_s)
            done, self._done = self._done, []
            failed, self._failed = self._failed, []
        return TierReport(tuple(done), tuple(failed), self.writes) if done or failed else None

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the jobs that are queued, as far as the time allows, and close the files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return  # it holds the files; they are closed with the process
        self._journal.close()
        self._slab.close()
        unlock(self._lock_fd)

    def _submit(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._num_reads += job.reads
            self._changed.notify_all()

    def buffer(self, kind: int) -> mmap.mmap:
        """Return memory for a unit of this kind."""
        with self._changed:
            if self._buffers[kind]:
                return self._buffers[kind].pop()
        return self.allocate(self._slab.layout.stored_bytes(kind))

    # --- the disk's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._next()
            if job.reads:
                self._read(job)
            else:
                self._change(job)

    def _next(self) -> Job:
        """Take the first read that no earlier job's unit delays, or else the first job."""
        place = 0
        if self._num_reads:  # there may be thousands of writes, and no read among them
            jobs = list(self._jobs)
            reads = (index for index, job in enumerate(jobs) if job.reads)
            free = (i for i in reads if not any(each.touches(jobs[i].kind, jobs[i].unit) for each in jobs[:i]))
            place = next(free, 0)
        job = self._jobs[place]
        del self._jobs[place]
        self._num_reads -= job.reads
        return job

    def _read(self, job: Job) -> None:
        assert job.name is not None
        buffer = self.buffer(job.kind)
        record = self._records[job.kind][job.unit]
        is_right = False
        if record["live"] and record["hash"].tobytes() == job.name.hash:
            reason = "its bytes are not those that were written"
            try:
                is_right = self._slab.read(job.kind, job.unit, buffer)
            except OSError as error:
                reason = str(error)
            is_right = is_right and self._sum(job.name, buffer) == record["sum"].tobytes()
            if not is_right and not self._has_failed_reads:
                self._has_failed_reads = True  # a broken disk fails for all entries
                LOGGER.warning(
                    "disk tier: an entry cannot be read and is computed instead: %s; later ones are only counted",
                    reason,
                )
        with self._changed:
            is_wanted = job.ticket not in self._discarded
            self._discarded.discard(job.ticket)
            if is_right and is_wanted:
                self._arrived[job.ticket] = job.kind, buffer
            else:
                self._buffers[job.kind].append(buffer)
            (self._done if is_right else self._failed).append(job.ticket)
            self._changed.notify_all()

    def _change(self, job: Job) -> None:
        is_done = False
        if job.removes:
            self._remove(job.name)
        elif self.writes:
            if job.source is not None:
                job.data = self.buffer(job.kind)
            try:
                self._write(job)
                is_done = True
            except OSError as error:
                self._stop_writing(error)
        with self._changed:
            if job.data is not None:
                self._buffers[job.kind].append(job.data)
            if job.ticket:
                (self._done if is_done else self._failed).append(job.ticket)
                self._changed.notify_all()

    def _remove(self, name: EntryName | None) -> None:
        """Remove entries whose contents are wrong. The journal is rewritten without them, or else emptied.

        A record that says so would not do: if it were damaged, the entries would be back.
        """
        num_gone = 0
        for table in self._records.values():
            is_named = table["live"] == 1
            if name is not None:
                is_named &= table["hash"] == np.void(name.hash)
            table["live"][is_named] = 0
            num_gone += int(is_named.sum())
        self._num_live -= num_gone
        if not num_gone:
            return
        try:
            self._rewrite()
        except OSError as error:
            self._stop_writing(error)
            self._journal.empty()

    def _rewrite(self) -> None:
        tables = [self._records[kind] for kind in (BLOCK, SLOT)]
        self._journal.rewrite(np.concatenate([table[table["live"] == 1] for table in tables]))

    def _write(self, job: Job) -> None:
        """Run a write or a copy. Raises OSError. A copy of an entry that is gone only clears the unit.

        The journal removes the overwritten entries before the write, and adds the new one after it.
        """
        if not (self._journal.is_in_place() and self._slab.is_in_place()):
            raise FileNotFoundError(errno.ENOENT, "the folder or a part of its files was removed")
        assert job.data is not None
        record: Records | None = None
        if job.source is None:
            assert job.name is not None
            record = self._record(job.name, job.data)
        elif self._records[job.kind]["live"][job.source] and self._slab.read(job.kind, job.source, job.data):
            record = self._records[job.kind][job.source : job.source + 1].copy()
        self._make_way(job)
        if record is None:
            return
        self._slab.write(job.kind, job.unit, job.data)
        record["unit"] = job.unit
        self._put(record)

    def _make_way(self, job: Job) -> None:
        """Remove the entries whose bytes a job will overwrite: its unit's, and those of the other kind in its page."""
        self._forget(np.asarray([job.unit]), job.kind)
        other = BLOCK + SLOT - job.kind
        per_page = self._slab.layout.per_page(other)
        first = job.unit // self._slab.layout.per_page(job.kind) * per_page
        self._forget(np.arange(first, first + per_page), other)

    def _forget(self, units: np.ndarray, kind: int) -> None:
        """Remove the live entries among these units from the records, and from the journal."""
        table = self._records[kind]
        gone = table[units[table["live"][units] == 1]]
        if not len(gone):
            return
        gone["live"] = 0
        table[gone["unit"]] = gone
        self._num_live -= len(gone)
        self._journal.append(gone, 0, time.time(), DAY_S)

    def _put(self, record: Records) -> None:
        kind = int(record["kind"][0])
        self._journal.append(record, self._slab.layout.stored_bytes(kind), time.time(), DAY_S)
        self._records[kind][record["unit"]] = record
        self._num_live += 1
        if self._journal.is_long(self._num_live):
            self._rewrite()

    def _record(self, name: EntryName, data: mmap.mmap) -> Records:
        record = np.zeros(1, RECORD)
        record["kind"], record["live"], record["depth"] = name.kind, 1, name.depth
        record["origin"], record["decoded"] = name.origin, name.decoded
        record["hash"], record["parent"] = np.void(name.hash), np.void(name.parent)
        record["sum"] = np.void(self._sum(name, data))
        return record

    def _sum(self, name: EntryName, data: mmap.mmap) -> bytes:
        return entry_sum(self._namespace, name, memoryview(data)[: self._slab.layout.unit_bytes(name.kind)])

    def _stop_writing(self, error: OSError) -> None:
        if self.writes:
            self.writes = False
            LOGGER.warning("disk tier: nothing is written until the next start, requests go on: %s", error)


def open_store(
    folder: Path, layout: SlabLayout, max_bytes: int, namespace: bytes, rank: int = 0, num_ranks: int = 1
) -> DiskStore | None:
    """Open a rank's part of the disk tier in `folder`; None if that is not possible, which a warning explains.

    The ranks share `max_bytes`. The folder is the namespace's own. Entries of another one are dropped.
    """
    num_pages = max_bytes // num_ranks // layout.page_bytes
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(folder / f"lock.{rank}", LOCK_WAIT_S)
    except OSError as error:
        LOGGER.warning("the disk tier is off: %s", error)
        return None
    if lock is None:
        LOGGER.warning(
            "the disk tier is off: another engine of the same model and options uses %s; give each a folder of its own",
            folder,
        )
        return None
    try:
        slab = Slab(folder / f"slab.{rank}", layout, num_pages)
    except OSError as error:
        unlock(lock)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; free space there, or lower kv_disk_size" if is_full else ""
        LOGGER.warning("the disk tier is off: %s cannot hold %g GiB: %s%s", folder, max_bytes / 2**30, error, hint)
        return None
    try:
        journal = Journal(folder / f"journal.{rank}", namespace)
    except OSError as error:
        slab.close()
        unlock(lock)
        LOGGER.warning(
            "the disk tier is off: its journal in %s cannot be written: %s; entries of earlier runs stay there for the "
            "next start",
            folder,
            error,
        )
        return None
    return DiskStore(journal, slab, lock, namespace)


def _fitting(entries: Records, slab: Slab) -> Records:
    """Return the entries whose units the slab had before it was opened, in pages that hold entries of one kind."""
    layout, kinds = slab.layout, entries["kind"]
    per_page = np.where(kinds == BLOCK, layout.blocks_per_page, layout.slots_per_page)
    pages = entries["unit"] // np.maximum(per_page, 1)
    is_inside = (per_page > 0) & (pages > 0) & (pages < slab.num_old_pages) & ((kinds == BLOCK) | (kinds == SLOT))
    entries, pages = entries[is_inside], pages[is_inside]
    mixed = np.intersect1d(pages[entries["kind"] == BLOCK], pages[entries["kind"] == SLOT])
    return entries[~np.isin(pages, mixed)]

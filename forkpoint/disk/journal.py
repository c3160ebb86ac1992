"""The journal: which unit of the slab holds which entry. An append-only file of checked batches of records."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from forkpoint.cache.tier_entries import RECORD, Records, no_entries, window_at
from forkpoint.disk.folder import names_open_file

MAGIC: Final = b"FKJ1"
# Magic, number of records, start of the day's window in seconds, bytes written in it, check of all but the magic.
HEAD: Final = struct.Struct("<4sIdQ8s")
CHECK_BYTES: Final = 8
MOST_BATCHES: Final = 4096  # a journal of more is rewritten as one batch, so that it loads quickly
LEAST_REWRITTEN: Final = 4096  # dead records; a shorter journal costs less than its rewriting
LOGGER: Final = logging.getLogger("forkpoint")


class Journal:
    """Owns the file `path`. Its first batch holds the namespace alone, as a record's `hash`.

    `entries` are the live records that the file had. Records of another namespace are dropped. A batch that is damaged,
    and all after it, count as never written, which a warning says. Methods raise OSError.
    """

    def __init__(self, path: Path, namespace: bytes) -> None:
        self._path = path
        self._namespace = namespace
        self.window_start_s, self.window_bytes = 0.0, 0
        self._num_batches = 0
        self._num_records = 0
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.entries, is_whole = self._load()
            if not (is_whole or is_new):
                LOGGER.warning(
                    "disk tier: its journal %s is incomplete; %d entries are left, and others are computed again",
                    path,
                    len(self.entries),
                )
            self.rewrite(self.entries)
        except OSError:
            os.close(self._fd)
            raise

    def _load(self) -> tuple[Records, bool]:
        """Return the live records of the file, and whether it has no other bytes than those of whole batches."""
        data = memoryview(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
        batches = list[Records]()
        offset = 0
        while offset + HEAD.size <= len(data):
            magic, count, start_s, num_bytes, check = HEAD.unpack_from(data, offset)
            body = offset + HEAD.size
            end = body + count * RECORD.itemsize
            if magic != MAGIC or end > len(data):
                break
            if _check(data[offset + 4 : body - CHECK_BYTES], data[body:end]) != check:
                break
            batches.append(np.frombuffer(data[body:end], RECORD))
            self.window_start_s, self.window_bytes = start_s, num_bytes
            offset = end
        if not batches or not len(batches[0]) or batches[0]["hash"][0].tobytes() != self._namespace:
            return no_entries(), False
        return newest(np.concatenate([batches[0][1:], *batches[1:]])), offset == len(data)

    def append(self, records: Records, num_bytes: int, now_s: float, window_s: float) -> None:
        """Append records as one batch, and count `num_bytes` as written in the current window of `window_s` seconds.

        A new window begins at `now_s` if the last one is over.
        """
        self.window_start_s, self.window_bytes = window_at(now_s, self.window_start_s, self.window_bytes, window_s)
        self.window_bytes += num_bytes
        _write_all(self._fd, self._batch(records))
        self._num_batches += 1
        self._num_records += len(records)

    def is_long(self, num_live: int) -> bool:
        """Return whether the journal should be rewritten; `num_live` of its records still count."""
        dead = self._num_records - num_live
        return self._num_batches > MOST_BATCHES or dead > max(num_live, LEAST_REWRITTEN)

    def rewrite(self, live: Records) -> None:
        """Replace the file by one with these records alone. The old file stays until the new one is complete."""
        first = np.zeros(1, RECORD)
        first["hash"] = np.void(self._namespace)
        other = self._path.with_name(self._path.name + ".new")
        fd = os.open(other, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write_all(fd, self._batch(np.concatenate([first, live])))
            os.replace(other, self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self._num_batches, self._num_records = 1, len(live)

    def empty(self) -> None:
        """Remove all records from the file, which needs no room on the disk. Errors are ignored."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)

    def is_in_place(self) -> bool:
        return names_open_file(self._path, self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _batch(self, records: Records) -> bytes:
        body = records.tobytes()
        head = HEAD.pack(MAGIC, len(records), self.window_start_s, self.window_bytes, b"")
        return head[:-CHECK_BYTES] + _check(memoryview(head)[4:-CHECK_BYTES], memoryview(body)) + body


def newest(records: Records) -> Records:
    """Return the records that still count, in their order: the last one of each unit, and of each entry, if live."""
    units = records["unit"].astype(np.int64) * 4 + records["kind"]
    records = records[_last_of_each(units)]
    records = records[records["live"] == 1]
    # Half of a hash tells entries apart. If two ever agree in it, one of them is a miss.
    halves = np.ascontiguousarray(records["hash"]).view("<u8").reshape(-1, 2)[:, 0]
    kept: Records = records[_last_of_each(halves ^ records["kind"])]
    return kept


def _last_of_each(keys: np.ndarray) -> np.ndarray:
    """Return the index of the last occurrence of each key, in ascending order."""
    _, from_end = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - from_end)


def _check(head: memoryview, body: memoryview) -> bytes:
    found = xxhash.xxh3_64(head)
    found.update(body)
    return found.digest()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

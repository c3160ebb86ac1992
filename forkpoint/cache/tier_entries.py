"""Entries in messages of the cache and the worker's tiers: names, reports, and records that outlive both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.hashing import HASH_BYTES

BLOCK, SLOT = 1, 2  # `kind` of a record
HOST_READY: Final = 0  # the ticket that reports, once, that the host tier's memory can be used
# Bytes of the device's memory that hold units on their way to the host tier, and on their way back, if it streams.
STORED_AT_ONCE: Final = 640 * 2**20
BUFFERED_AT_ONCE: Final = 256 * 2**20
# The most bytes that a plan with rows of other requests loads, and the most that it starts to read. These copies delay
# the rows: by about 10 ms on a CPU, and on a GPU by the time that its host needs to issue them.
LOADED_AT_ONCE: Final = 64 * 2**20
DAY_S: Final = 86400.0  # the window in which written bytes are counted
# One unit of the slab and what it holds. `origin` and `decoded` matter for slots alone. `sum` is the xxh3-128 of the
# namespace, the entry's name and its bytes.
RECORD: Final = np.dtype(
    [
        ("unit", "<u4"),
        ("depth", "<u4"),
        ("kind", "u1"),
        ("live", "u1"),  # 0: the unit holds nothing any more
        ("origin", "u1"),
        ("decoded", "u1"),
        ("hash", f"V{HASH_BYTES}"),
        ("parent", f"V{HASH_BYTES}"),
        ("sum", "V16"),
    ]
)
Records: TypeAlias = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class EntryName:
    """The name of an entry on the disk or in another engine: the block of a hash, or the state after it.

    `depth` counts blocks from the root, this one included. `parent` is the hash of the block before it. `origin` and
    `decoded` are those of a checkpoint.
    """

    kind: int
    hash: bytes
    parent: bytes
    depth: int
    origin: int = 0
    decoded: bool = False

    def __reduce__(self) -> tuple[type[Self], tuple[int | bytes, ...]]:
        """Return how pickle restores it: in a third of the default's time, and fetches name hundreds of entries."""
        return type(self), (self.kind, self.hash, self.parent, self.depth, self.origin, self.decoded)


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The disk tier that a worker has opened.

    `num_pages` includes page 0, which stays empty. `entries` are the live records of earlier processes, as RECORD.
    Since `window_start_s`, a time as `time.time()` returns it, `window_bytes` were written.
    """

    num_pages: int
    entries: Records
    window_start_s: float = 0.0
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierReport:
    """A report of the worker's tiers: the tickets of reads and writes that ended or failed since the last report.

    `writes`: the worker still writes to the disk. It stops after an error.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    writes: bool = True


def no_entries() -> Records:
    return np.zeros(0, RECORD)


def window_at(now_s: float, start_s: float, num_bytes: int, window_s: float = DAY_S) -> tuple[float, int]:
    """Return the start of the window of `window_s` seconds at `now_s`, and the bytes that were written in it.

    The last window began at `start_s` and has `num_bytes`. If the clock was put back to before it, its bytes count in
    a window that begins now: they may have been written a moment ago.
    """
    if now_s < start_s:
        return now_s, num_bytes
    return (start_s, num_bytes) if now_s - start_s < window_s else (now_s, 0)

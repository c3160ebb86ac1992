"""The ring: memory of a device in which a prefill engine keeps what it has offered last, for engines of its machine.

The oldest entries are overwritten, whether somebody copies them or not. Before the prefill engine writes an entry, it
notes where the entry ends. A decode engine reads the note after a copy, and drops the copy if it came too late.
"""

from __future__ import annotations

import errno
import os
from typing import Final

import msgspec
import numpy as np

from forkpoint.shared_arrays import MemoryReader, Place, SharedMemory, place_of

NOTE: Final = np.dtype(np.int64)
CLOSED: Final = np.iinfo(NOTE).max  # the note of a ring without entries
ID_BYTES: Final = 16


class RingFacts(msgspec.Struct, array_like=True, frozen=True):
    """The facts for opening another process's ring: the device's handle of the memory, its bytes, the note's place.

    No other ring has the same `ring_id`. A process that takes the place of another one might get the same handle.
    """

    ring_id: bytes
    handle: bytes
    num_bytes: int
    note: Place


class Ring:
    """A prefill engine's ring. An entry's position is the number of bytes that were given out or skipped before it."""

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        """Raises OSError without shared memory for the note."""
        self._note = np.ndarray((1,), NOTE, SharedMemory.new(NOTE.itemsize))
        place = place_of(self._note)
        assert place is not None
        self.facts = RingFacts(os.urandom(ID_BYTES), handle, num_bytes, place)

    def take(self, num_bytes: int) -> int | None:
        """Return the position for an entry, which may be written from now on; None if the ring is too small."""
        size, position = self.facts.num_bytes, int(self._note[0])
        if num_bytes > size:
            return None
        if position % size + num_bytes > size:  # an entry is in one piece
            position += size - position % size
        self._note[0] = position + num_bytes
        return position

    def close(self) -> None:
        """Let no entry count as being there any more."""
        self._note[0] = CLOSED

    def holds(self, position: int) -> bool:
        """Return whether nothing may have been written over the entry at a position."""
        return int(self._note[0]) <= position + self.facts.num_bytes


class RingReader:
    """Reads the note of another engine's ring, also after that engine has ended."""

    def __init__(self, facts: RingFacts) -> None:
        """Raises OSError, or OverflowError for a place that cannot exist, if the note cannot be read from here."""
        self.facts, self._memory = facts, MemoryReader()
        try:
            self._note(self._memory)
        except BaseException:
            self.close()
            raise

    def start_of(self, position: int, num_bytes: int) -> int | None:
        """Return the byte of the ring at which an entry of this size starts; None if it cannot be there."""
        start = position % self.facts.num_bytes
        return None if start + num_bytes > self.facts.num_bytes else start

    def holds(self, position: int) -> bool:
        """Return what `Ring.holds` returns, and False if the note cannot be read."""
        try:
            return self._note(self._memory) <= position + self.facts.num_bytes
        except OSError:
            return False

    def has_ended(self) -> bool:
        """Return whether the other engine has ended or has closed its ring."""
        try:
            with MemoryReader() as memory:
                return self._note(memory) == CLOSED
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # these are about this process

    def _note(self, memory: MemoryReader) -> int:
        note = bytearray(NOTE.itemsize)
        memory.read_into(self.facts.note, memoryview(note))
        return int(np.frombuffer(note, NOTE)[0])

    def close(self) -> None:
        self._memory.close()

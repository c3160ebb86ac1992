"""The ring: memory of a device in which a prefill engine keeps what it has offered last, for engines of its machine.

The oldest entries are overwritten, whether somebody copies them or not. The prefill engine notes how far it may have
written before it writes. A decode engine reads the note after a copy, and drops the copy if it came too late.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from forkpoint.shared_arrays import MemoryReader, Place, SharedMemory, place_of

NOTE: Final = np.dtype(np.int64)


class RingFacts(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to open a ring: the device's handle of the memory, its bytes, and the note's place."""

    handle: bytes
    num_bytes: int
    note: Place


class Ring:
    """A prefill engine's ring. An entry's position is the number of bytes that were ever given out before it."""

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        """Raises OSError without shared memory for the note."""
        self._note = np.ndarray((1,), NOTE, SharedMemory.new(NOTE.itemsize))
        place = place_of(self._note)
        assert place is not None
        self.facts = RingFacts(handle, num_bytes, place)

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
        self._note[0] = np.iinfo(NOTE).max

    def holds(self, position: int) -> bool:
        """Return whether nothing may have been written over the entry at a position."""
        return int(self._note[0]) <= position + self.facts.num_bytes


class RingReader:
    """Reads the note of another engine's ring."""

    def __init__(self, facts: RingFacts) -> None:
        self.facts, self._memory = facts, MemoryReader()

    def start_of(self, position: int, num_bytes: int) -> int | None:
        """Return the byte of the ring at which an entry of this size starts; None if it cannot be there."""
        start = position % self.facts.num_bytes
        return None if start + num_bytes > self.facts.num_bytes else start

    def holds(self, position: int) -> bool:
        """Return what `Ring.holds` returns, and False if the note cannot be read."""
        note = bytearray(NOTE.itemsize)
        try:
            self._memory.read_into(self.facts.note, memoryview(note))
        except OSError:
            return False
        return int(np.frombuffer(note, NOTE)[0]) <= position + self.facts.num_bytes

    def close(self) -> None:
        self._memory.close()

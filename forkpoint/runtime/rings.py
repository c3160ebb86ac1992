"""The memory of rings (`peer/ring.py`): an engine's own, and those of other engines."""

from __future__ import annotations

import logging
from typing import Final

from torch import Tensor

from forkpoint.peer.ring import Ring, RingFacts, RingReader
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.stretch import Stretch

LOGGER: Final = logging.getLogger("forkpoint")


class OwnRing:
    """Writes offered units to a ring of `num_bytes`. Raises OSError if the device has no such memory."""

    def __init__(self, platform: Platform, num_bytes: int) -> None:
        self._platform = platform
        self._memory, handle = platform.shared_memory(num_bytes)
        self.ring = Ring(handle, num_bytes)

    def take(self, num_bytes: int) -> tuple[int, Stretch] | None:
        """Return the position and the memory for a unit; None if the ring is too small."""
        position = self.ring.take(num_bytes)
        if position is None:
            return None
        start = position % self.ring.facts.num_bytes
        return position, Stretch(self._memory, start, start + num_bytes)

    def close(self) -> None:
        """Free the memory. No copy of this engine may run."""
        self.ring.close()
        self._platform.free_shared_memory(self._memory)


class PeerRings:
    """Rings of other engines, by their handle."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._open: dict[bytes, tuple[RingReader, Tensor]] = {}

    def open(self, facts: RingFacts) -> bool:
        """Open a ring. Returns whether its memory can be read from here."""
        if facts.num_bytes <= 0:
            return False
        try:
            memory = self._platform.open_shared_memory(facts.handle, facts.num_bytes)
        except OSError as error:
            LOGGER.info("peers: the memory of the other engine's device cannot be read from here: %s", error)
            return False
        self._open[facts.handle] = RingReader(facts), memory
        LOGGER.info("peers: later prompts are copied from the memory of the other engine's device")
        return True

    def close(self, handle: bytes) -> None:
        reader, memory = self._open.pop(handle)
        reader.close()
        self._platform.synchronize()  # copies may still read it
        self._platform.close_shared_memory(memory)

    def close_all(self) -> None:
        for handle in list(self._open):
            self.close(handle)

    def find(self, handle: bytes, position: int, num_bytes: int) -> Stretch | None:
        """Return the memory of the unit at a position of a ring; None if it cannot be there."""
        if handle not in self._open:
            return None
        reader, memory = self._open[handle]
        start = reader.start_of(position, num_bytes)
        return None if start is None else Stretch(memory, start, start + num_bytes)

    def holds(self, handle: bytes, position: int) -> bool:
        """Return whether a unit that was copied from a ring was there until now."""
        return handle in self._open and self._open[handle][0].holds(position)

"""The memory of rings (`peer/ring.py`): an engine's own, and those of other engines."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import Final

from torch import Tensor

from forkpoint.peer.ring import Ring, RingFacts, RingReader
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.stretch import Stretch

LOGGER: Final = logging.getLogger("forkpoint")


class OwnRing:
    """Writes offered units to a ring of `num_bytes`."""

    def __init__(self, platform: Platform, num_bytes: int) -> None:
        """Raises OSError if the device or the system has no such memory."""
        self._platform = platform
        self._memory, handle = platform.shared_memory(num_bytes)
        try:
            self.ring = Ring(handle, num_bytes)
        except BaseException:
            platform.free_shared_memory(self._memory)
            raise

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
    """Rings of other engines, by their `ring_id`."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._open: dict[bytes, tuple[RingReader, Tensor]] = {}

    def open(self, facts: RingFacts) -> bool:
        """Open a ring, and close those of engines that have ended. Returns whether it can be read from here.

        Its note has to be readable, too. Containers may share a device without the files of their processes.
        """
        for ended in [ring_id for ring_id, (reader, _) in self._open.items() if reader.has_ended()]:
            self.close(ended)
        if facts.num_bytes <= 0 or facts.ring_id in self._open:
            return False
        with ExitStack() as opened:
            try:
                reader = opened.enter_context(closing(RingReader(facts)))
                memory = self._platform.open_shared_memory(facts.handle, facts.num_bytes)
            except (OSError, OverflowError) as error:
                LOGGER.info("peers: the memory of the other engine's device cannot be read from here: %s", error)
                return False
            opened.pop_all()
        self._open[facts.ring_id] = reader, memory
        LOGGER.info("peers: later prompts are copied from the memory of the other engine's device")
        return True

    def close(self, ring_id: bytes) -> None:
        """Close a ring, unless `open` has closed it because its engine has ended."""
        if ring_id not in self._open:
            return
        reader, memory = self._open.pop(ring_id)
        reader.close()
        self._platform.synchronize()  # copies may still read it
        self._platform.close_shared_memory(memory)

    def close_all(self) -> None:
        for ring_id in list(self._open):
            self.close(ring_id)

    def find(self, ring_id: bytes, position: int, num_bytes: int) -> Stretch | None:
        """Return the memory of the unit at a position of a ring; None if it cannot be there."""
        if ring_id not in self._open:
            return None
        reader, memory = self._open[ring_id]
        start = reader.start_of(position, num_bytes)
        return None if start is None else Stretch(memory, start, start + num_bytes)

    def holds(self, ring_id: bytes, position: int) -> bool:
        """Return whether a unit that was copied from a ring was there until now."""
        return ring_id in self._open and self._open[ring_id][0].holds(position)

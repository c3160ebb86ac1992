"""Memory of the host that the device copies to and from, in buffers that are used again and again."""

from __future__ import annotations

import logging
import mmap
import threading
from typing import Final

import torch
from torch import Tensor

from forkpoint.platforms.platform import Platform
from forkpoint.shared_arrays import CAN_SHARE, SharedMemory

# Bytes of memory that `take` divides. Each needs an open file, and the system takes milliseconds to pin it.
SEGMENT_BYTES: Final = 1 << 26
LOGGER: Final = logging.getLogger("forkpoint")


class PinnedBuffers:
    """Allocates buffers that the device reads and writes during its other work. Several threads may use it.

    If the system does not pin them, copies work all the same and hold up steps, which is logged once. Other processes
    of the same user can open the buffers that `take` returns, where the system allows that (shared_arrays.py).
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._lock = threading.RLock()  # guards all below
        self._idle: dict[int, list[memoryview]] = {}  # by size
        self._left: list[memoryview] = []  # of segments that were not divided to their end
        self._pinned: list[Tensor] = []
        self._is_refused = False
        self._is_closing = False
        self._preparing: threading.Thread | None = None

    def prepare(self, num_bytes: int) -> None:
        """Pin `num_bytes` of memory in the background, so that `take` need not wait. Call it once."""
        self._preparing = threading.Thread(target=self._prepare, args=(num_bytes,), name="pin buffers", daemon=True)
        self._preparing.start()

    def _prepare(self, num_bytes: int) -> None:
        for _ in range(num_bytes // SEGMENT_BYTES):
            if self._is_closing or self._is_refused:
                return
            memory = _new_memory(SEGMENT_BYTES)
            if not _is_reusable(memory):
                return
            segment = memoryview(self._pin(memory))
            with self._lock:
                self._left.append(segment)

    def allocate(self, num_bytes: int) -> mmap.mmap:
        """Return new pinned memory, which starts at a page of the system."""
        return self._pin(mmap.mmap(-1, num_bytes))

    def _pin(self, memory: mmap.mmap) -> mmap.mmap:
        view = as_tensor(memory)
        try:
            self._platform.pin(view)
        except RuntimeError as error:
            with self._lock:
                is_first, self._is_refused = not self._is_refused, True
            if is_first:
                LOGGER.warning("the system pins no more memory, so that copies of tiers may delay steps: %s", error)
            return memory
        with self._lock:
            self._pinned.append(view)
        return memory

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer, whose contents are arbitrary."""
        with self._lock:
            idle = self._idle.get(num_bytes)
            if idle:
                return idle.pop()
            place = next((place for place, left in enumerate(self._left) if len(left) >= num_bytes), None)
            if place is None:
                memory = _new_memory(num_bytes)
                left = memoryview(self._pin(memory) if _is_reusable(memory) else memory)  # pinned memory is kept
            else:
                left = self._left.pop(place)
            if len(left) > num_bytes:
                self._left.append(left[num_bytes:])
            return left[:num_bytes]

    def give(self, buffer: memoryview) -> None:
        """Let `take` return a buffer again, unless later ones can be shared and this one cannot."""
        with self._lock:
            if _is_reusable(buffer.obj):
                self._idle.setdefault(len(buffer), []).append(buffer)

    def close(self) -> None:
        """Unpin all buffers. No copy may run."""
        self._is_closing = True
        if self._preparing is not None:
            self._preparing.join()
        with self._lock:
            for view in self._pinned:
                self._platform.unpin(view)
            self._pinned.clear()
            self._idle.clear()
            self._left.clear()


def _new_memory(num_bytes: int) -> mmap.mmap:
    """Return a segment of at least so many bytes.

    Other processes can open it. If the system has no shared memory left, it is just as large as necessary and belongs
    to this process alone, so that later buffers are shared again.
    """
    if not CAN_SHARE:
        return mmap.mmap(-1, max(num_bytes, SEGMENT_BYTES))
    try:
        return SharedMemory.new(max(num_bytes, SEGMENT_BYTES))
    except OSError:
        return mmap.mmap(-1, num_bytes)


def _is_reusable(memory: object) -> bool:
    """Return whether buffers of this memory may be used again: they can be shared, on a system that shares any."""
    return not CAN_SHARE or isinstance(memory, SharedMemory)


def as_tensor(memory: mmap.mmap | memoryview) -> Tensor:
    """Return bytes of the host as a tensor that shares them."""
    return torch.frombuffer(memory, dtype=torch.uint8)

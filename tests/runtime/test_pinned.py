"""Buffers come from few segments, and do not overlap."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from torch import Tensor

from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import PinnedBuffers
from forkpoint.shared_arrays import CAN_SHARE, SharedMemory, place_of


def test_buffers_divide_segments_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.runtime.pinned.SEGMENT_BYTES", 1 << 16)
    platform, pinned, unpinned = CpuPlatform(), list[Tensor](), list[int]()
    monkeypatch.setattr(platform, "pin", pinned.append)
    monkeypatch.setattr(platform, "unpin", lambda memory: unpinned.append(memory.data_ptr()))
    buffers = PinnedBuffers(platform)
    sizes = [1000, 50_000, 60_000, 14_000, 1000, 100_000]
    taken = [buffers.take(size) for size in sizes]
    for number, buffer in enumerate(taken):
        buffer[:] = bytes([number]) * len(buffer)
    assert [bytes(buffer) for buffer in taken] == [bytes([number]) * size for number, size in enumerate(sizes)]
    assert len(pinned) == 3, "what is left of a segment serves smaller buffers"
    buffers.give(taken[1])
    assert bytes(buffers.take(50_000)) == bytes([1]) * 50_000, "it is used again"
    buffers.prepare(3 << 16)
    assert buffers._preparing is not None
    buffers._preparing.join()
    buffers.take(60_000)
    assert len(pinned) == 6, "the memory was pinned before"
    buffers.close()
    assert unpinned == [memory.data_ptr() for memory in pinned]


def test_memory_that_cannot_be_shared_is_neither_pinned_nor_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers and fetches need shared memory, and pinned memory lives until `close`."""
    if not CAN_SHARE:
        pytest.skip("this system has no memory for several processes")
    pinned, platform = list[Tensor](), CpuPlatform()
    monkeypatch.setattr(platform, "pin", pinned.append)

    def refuse(num_bytes: int) -> SharedMemory:
        raise OSError(errno.EMFILE, "too many open files")

    buffers = PinnedBuffers(platform)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "new", refuse)
        unshared = buffers.take(1000)
        assert len(unshared) == 1000 and not pinned
    buffers.give(unshared)
    assert place_of(np.frombuffer(buffers.take(1000), np.uint8)) is not None, "the next one is shared again"
    assert len(pinned) == 1

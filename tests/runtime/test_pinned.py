"""Buffers come from few segments, and do not overlap."""

from __future__ import annotations

import pytest
from torch import Tensor

from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import PinnedBuffers


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

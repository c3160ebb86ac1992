"""The ring of offered entries: what its note says is there, is there."""

from __future__ import annotations

import errno
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.peer.protocol import IN_RING, PartHead, in_ring
from forkpoint.peer.ring import Ring, RingReader
from forkpoint.shared_arrays import CAN_SHARE

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this system has no memory for several processes")


@given(st.integers(1, 200), st.lists(st.integers(1, 90), max_size=40))
def test_entries_that_are_held_were_not_written_over(num_bytes: int, sizes: list[int]) -> None:
    ring, memory, entries = Ring(b"handle", num_bytes), bytearray(num_bytes), list[tuple[int, bytes]]()
    with closing(RingReader(ring.facts)) as reader:
        for number, size in enumerate(sizes):
            position = ring.take(size)
            assert (position is None) == (size > num_bytes)
            if position is None:
                continue
            start = reader.start_of(position, size)
            assert start is not None, "an entry is in one piece"
            entries.append((position, bytes([number + 1]) * size))
            memory[start : start + size] = entries[-1][1]
            held = [ring.holds(position) for position, _ in entries]
            assert held == [reader.holds(position) for position, _ in entries] == sorted(held) and held[-1]
            for is_held, (position, contents) in zip(held, entries, strict=True):
                if is_held:
                    start = reader.start_of(position, len(contents))
                    assert start is not None and memory[start : start + len(contents)] == contents
        assert not reader.has_ended()
        ring.close()
        assert reader.has_ended()
        assert not any(reader.holds(position) for position, _ in entries)


def refused(*given: object) -> int:
    raise OSError(errno.EMFILE, "too many open files")


def test_a_ring_whose_note_is_gone_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(b"handle", 100)
    position = ring.take(10)
    assert position is not None
    with closing(RingReader(ring.facts)) as reader:
        assert reader.holds(position) and not reader.has_ended()
        with monkeypatch.context() as limited:
            limited.setattr("os.open", refused)
            assert not reader.has_ended(), "this process has too many open files"
        facts = ring.facts
        del ring
        assert reader.has_ended()
    with pytest.raises(OSError, match=r"No such file|other memory"):
        RingReader(facts)


@given(st.integers(0, 2**62), st.integers(1, 10**6), st.integers(1, 10**6))
def test_an_entry_never_starts_where_it_would_leave_the_ring(position: int, num_bytes: int, size: int) -> None:
    """Whatever position another engine names."""
    ring = Ring(b"handle", num_bytes)
    with closing(RingReader(ring.facts)) as reader:
        start = reader.start_of(position, size)
    assert start is None or 0 <= start <= num_bytes - size
    head = PartHead.unpack(PartHead(IN_RING, place=in_ring(position)).pack())
    assert head.status == IN_RING and head.place.offset == position

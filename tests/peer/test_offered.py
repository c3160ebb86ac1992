"""What a prefill engine holds for others stays bounded, and ends."""

from __future__ import annotations

import threading

from forkpoint.cache.disk_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.offered import Offered, key_of

UNIT = 100  # bytes


def name(number: int, kind: int = BLOCK) -> EntryName:
    return EntryName(kind, number.to_bytes(16, "little"), b"", number)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(max_bytes: int = 10 * UNIT) -> tuple[Offered, Clock]:
    clock = Clock()
    return Offered(b"n" * 16, max_bytes, 30.0, clock), clock


def add(offered: Offered, lease: int, *numbers: int) -> list[bytes]:
    for number in numbers:
        offered.add(name(number), memoryview(bytes([number]) * UNIT), lease)
    return [key_of(name(number)) for number in numbers]


def test_an_offer_is_found_until_its_time_is_up() -> None:
    offered, clock = make()
    keys = add(offered, 1, 3, 4)
    found = offered.wait_for(1, keys, 0)
    assert found is not None and [data for data, _ in found] == [bytes([3]) * UNIT, bytes([4]) * UNIT]
    assert offered.wait_for(1, [key_of(name(3, SLOT))], 0) is None, "a state is not a block"
    clock.now = 29.0
    assert offered.wait_for(1, keys, 0) is not None
    clock.now = 31.0
    offered.expire()
    assert offered.wait_for(1, keys, 0) is None and offered.num_bytes == 0


def test_prompts_share_copies() -> None:
    offered, _ = make()
    first, second = add(offered, 1, 3, 4), add(offered, 2, 3, 5)
    assert offered.num_bytes == 3 * UNIT
    offered.end(1)
    assert offered.wait_for(1, first, 0) is None and offered.wait_for(2, second, 0) is not None
    offered.end(1)
    offered.end(2)
    assert offered.num_bytes == 0


def test_the_oldest_gives_way() -> None:
    offered, _ = make(4 * UNIT)
    first, second = add(offered, 1, 1, 2), add(offered, 2, 3, 4, 5)
    assert offered.wait_for(1, first, 0) is None and offered.wait_for(2, second, 0) is not None
    third = add(offered, 3, *range(10, 20))
    assert offered.num_bytes == 0 and offered.wait_for(3, third[:1], 0) is None, "no room for it, even alone"
    assert offered.wait_for(4, add(offered, 4, 1), 0) is not None


def test_wrong_contents_are_withdrawn() -> None:
    offered, _ = make()
    first, second = add(offered, 1, 1, 2), add(offered, 2, 3)
    offered.withdraw(name(2).hash)
    assert offered.wait_for(1, first[:1], 0) is None and offered.wait_for(2, second, 0) is not None
    offered.withdraw(None)
    assert offered.wait_for(2, second, 0) is None and offered.num_bytes == 0


def test_who_comes_before_the_copies_waits_for_them() -> None:
    offered, _ = make()
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(offered.wait_for(1, [key_of(name(7))], 20)))
    waiting.start()
    add(offered, 1, 7)
    waiting.join()
    assert found[0] is not None

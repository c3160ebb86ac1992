"""What a prefill engine holds for others stays bounded, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.offered import Offered, OfferedEntry, key_of

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
        offered.add([OfferedEntry(name(number), memoryview(bytes([number]) * UNIT), is_copied=True)], lease)
    return [key_of(name(number)) for number in numbers]


def got(offered: Offered, lease: int, keys: list[bytes]) -> list[bytes] | None:
    """What a connection sends of a lease."""
    held = offered.wait_for(lease, keys, 0)
    sent = [bytes(entry.data) for entry in held]
    offered.sent(held)
    return sent if len(held) == len(keys) else None


def test_an_offer_is_found_until_its_time_is_up() -> None:
    offered, clock = make()
    keys = add(offered, 1, 3, 4)
    assert got(offered, 1, keys) == [bytes([3]) * UNIT, bytes([4]) * UNIT]
    assert got(offered, 1, [key_of(name(3, SLOT))]) is None, "a state is not a block"
    clock.now = 29.0
    assert got(offered, 1, keys) is not None
    clock.now = 31.0
    offered.expire()
    assert got(offered, 1, keys) is None and offered.num_bytes == 0


def test_prompts_share_copies() -> None:
    offered, _ = make()
    first, second = add(offered, 1, 3, 4), add(offered, 2, 3, 5)
    assert offered.num_bytes == 3 * UNIT
    offered.end(1)
    assert got(offered, 1, first) is None and got(offered, 2, second) is not None
    offered.end(1)
    offered.end(2)
    assert offered.num_bytes == 0


def test_the_oldest_gives_way() -> None:
    offered, _ = make(4 * UNIT)
    first, second = add(offered, 1, 1, 2), add(offered, 2, 3, 4, 5)
    assert got(offered, 1, first) is None and got(offered, 2, second) is not None
    third = add(offered, 3, *range(10, 20))
    assert offered.num_bytes == 0 and got(offered, 3, third[:1]) is None, "no room for it, even alone"
    assert got(offered, 4, add(offered, 4, 1)) is not None


def test_wrong_contents_are_withdrawn() -> None:
    offered, _ = make()
    first, second = add(offered, 1, 1, 2), add(offered, 2, 3)
    offered.withdraw(name(2).hash)
    assert got(offered, 1, first[:1]) is None and got(offered, 2, second) is not None
    offered.withdraw(None)
    assert got(offered, 2, second) is None and offered.num_bytes == 0


def test_who_comes_before_the_copies_waits_for_them() -> None:
    offered, _ = make()
    entry = OfferedEntry(name(7), bytes(UNIT))
    waits: list[tuple[Callable[[], object], Callable[[], None]]] = [
        (lambda: offered.wait_for(1, [key_of(name(7))], 20), lambda: offered.add([entry], 1)),
        (lambda: offered.wait_for_copy(entry, 20), lambda: offered.copied([entry])),
        (lambda: offered.wait_until_complete(1, 20), lambda: offered.complete(1)),
    ]
    for wait, end in waits:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        while not offered._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        end()
        waiting.join(5)
        assert not waiting.is_alive() and wait()


@pytest.mark.parametrize("is_early", [False, True])
def test_nobody_waits_for_a_lease_that_has_ended(is_early: bool) -> None:
    offered, _ = make()
    add(offered, 1, 7)
    found: list[object] = []

    def wait() -> None:
        found.append((offered.wait_for(1, [key_of(name(8))], 20), offered.wait_until_complete(1, 20)))

    waiting = threading.Thread(target=wait, daemon=True)
    if is_early:
        waiting.start()
    offered.end(1)
    if not is_early:
        waiting.start()
    waiting.join(5)
    assert found == [([], False)]


def test_what_is_being_sent_stays_as_it_is() -> None:
    offered, _ = make()
    given: list[memoryview] = []
    offered.give = given.append
    data = [memoryview(bytearray(bytes([number]) * UNIT)) for number in (1, 2, 3)]
    offered.add([OfferedEntry(name(1), data[0], is_copied=True)], 1)
    sending = offered.wait_for(1, [key_of(name(1))], 0)
    offered.withdraw(name(1).hash)
    assert not given and offered.num_bytes == UNIT, "its memory may not be used again yet"
    offered.add([OfferedEntry(name(1), data[1], is_copied=True)], 2)
    offered.add([OfferedEntry(name(1), data[2], is_copied=True)], 2)
    assert given == [data[2]], "the lease has it already"
    assert got(offered, 2, [key_of(name(1))]) == [bytes([2]) * UNIT], "what was withdrawn is not shared"
    offered.sent(sending)
    assert given == [data[2], data[0]] and offered.num_bytes == UNIT
    offered.end(2)
    assert given == [data[2], data[0], data[1]] and offered.num_bytes == 0


@pytest.mark.parametrize("is_added_first", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_comes_back_once_its_copy_is_done(is_added_first: bool, is_kept: bool) -> None:
    """The copy writes to it until then. A thread adds entries when they are in the ring, another follows the copies."""
    offered, _ = make()
    given: list[memoryview] = []
    offered.give = given.append
    entry = OfferedEntry(name(1), memoryview(bytearray(UNIT)))
    if not is_kept:
        offered.end(1)
    if is_added_first:
        offered.add([entry], 1)
        offered.end(1)
        assert not given, "the copy still writes there"
        assert not offered.wait_for_copy(entry, 0)
        offered.copied([entry])
    else:
        offered.copied([entry])
        offered.add([entry], 1)
        assert not given or not is_kept
        offered.end(1)
    assert given == [entry.data] and offered.wait_for_copy(entry, 0)

"""What gives way first: the policies' order, and the queue that keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.eviction import EntryFacts, LRUPolicy, RecomputeCost
from forkpoint.cache.eviction_queue import ITEMS_PER_ENTRY, MIN_COMPACTED, EvictionQueue
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.learnt import ConversationTurn, LearntPolicy
from forkpoint.cache.policies import EVICTION
from forkpoint.cache.tree import Evictable, Origin

BASE = EntryFacts(
    origin=Origin.PROMPT_END,
    cost=1000.0,
    num_bytes=1 << 20,
    kv_bytes=1 << 19,
    last_used=1.0,
    age=0.5,
    block_hash=BlockHash(b""),
)


def test_lru_looks_at_the_last_use() -> None:
    policy = LRUPolicy()
    assert policy.key(BASE) < policy.key(BASE._replace(last_used=1.1, cost=1.0))
    assert policy.key(BASE._replace(num_expected=1)) > policy.key(BASE._replace(last_used=1e9))


@pytest.mark.parametrize(
    "better",
    [
        {"cost": 2000.0},
        {"num_bytes": 1 << 19},
        {"num_expected": 1},
        {"note": ConversationTurn(number=3)},
        {"note": ConversationTurn(awaits_tool=True)},
    ],
    ids=str,
)
def test_cost_prefers(better: dict[str, object]) -> None:
    assert LearntPolicy().key(BASE._replace(**better)) > LearntPolicy().key(BASE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "worse",
    [
        {"has_children": True},
        {"has_children": True, "superseded": True},
        {"origin": Origin.NEAR_END, "has_children": True},
        {"origin": Origin.FALLBACK, "has_children": True},
        {"age": 3.0},
    ],
    ids=str,
)
def test_the_end_of_a_conversation_is_worth_more_than(worse: dict[str, object]) -> None:
    assert LearntPolicy().key(BASE._replace(**worse)) < LearntPolicy().key(BASE)  # type: ignore[arg-type]


def test_names() -> None:
    assert [EVICTION.find(name) for name in ("cost", "lru")] == [LearntPolicy, LRUPolicy]


def test_recompute_cost_counts_attention() -> None:
    cost = RecomputeCost(per_token=2.0, per_pair=1.0)
    assert cost(0, 4) == 2.0 * 4 + (0 + 4) * 4 / 2
    assert cost(0, 2) + cost(2, 4) == cost(0, 4)


@dataclass(eq=False)
class Item(Evictable):
    """Its key is `key` until its due time and `later` from then on."""

    key: float
    due: float = math.inf
    later: float = 0.0
    evictable: bool = True

    @property
    def is_evictable(self) -> bool:
        return self.evictable and not self.removed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def key(self, entry: Item) -> float:
        return entry.key if self.now < entry.due else entry.later

    def due(self, entry: Item) -> float:
        return entry.due if self.now < entry.due else math.inf


def make_queue(clock: Clock) -> EvictionQueue[Item]:
    return EvictionQueue(clock.key, clock.due)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["push", "raise", "lower", "remove", "pin", "unpin", "wait", "will_change", "push_due", "take"]
            ),
            st.integers(0, 7),
            st.integers(0, 99),
        ),
        max_size=80,
    )
)
def test_the_lowest_evictable_entry_comes_first(ops: list[tuple[str, int, int]]) -> None:
    """Against a plain list. A key may rise without notice, or change at its due time; one that falls otherwise, or an
    entry freed, is pushed again."""
    clock = Clock()
    queue, entries = make_queue(clock), [Item(float(index)) for index in range(8)]
    pushed: set[int] = set()
    for op, index, value in ops:
        entry = entries[index]
        if op == "push" or (op == "unpin" and not entry.evictable):
            entry.evictable, entry.removed = True, False
            queue.push(entry)
            pushed.add(index)
        elif op == "raise":
            entry.key += value
            entry.later += value
        elif op == "lower":
            entry.key -= value
            entry.later -= value
            queue.push(entry)
            pushed.add(index)
        elif op == "will_change":
            entry.key, entry.due, entry.later = clock.key(entry), clock.now + 1 + value % 7, float(value)
            queue.push(entry)
            pushed.add(index)
        elif op == "wait":
            clock.now += value / 25
        elif op == "push_due":
            queue.push_due(clock.now, value % 3)
        elif op == "remove":
            entry.removed = True
        elif op == "pin":
            entry.evictable = False
        elif op == "take":
            found = queue.lowest(clock.now)
            gone = {i for i in pushed if not entries[i].is_evictable}
            candidates = [clock.key(entries[i]) for i in pushed - gone]
            assert (found[0] if found else None) == min(candidates, default=None)
            if found:
                assert clock.key(found[1]) == found[0]
                assert queue.first(clock.now, 1 + value % 3)[0] is found[1]


@given(st.lists(st.floats(0, 9), max_size=30), st.sets(st.integers(0, 29)), st.integers(1, 12))
def test_the_first_entries_are_those_of_the_lowest_keys(keys: list[float], pinned: set[int], most: int) -> None:
    """Up to `most`; fewer if pinned entries lie before them."""
    queue, entries = make_queue(Clock()), [Item(key) for key in keys]
    for entry in entries:
        queue.push(entry)
    for index in pinned.intersection(range(len(entries))):
        entries[index].evictable = False
    evictable = sorted(entry.key for entry in entries if entry.evictable)
    found = [entry.key for entry in queue.first(0.0, most)]
    assert found == evictable[: len(found)]
    num_pinned = len(entries) - len(evictable)
    assert len(found) == min(most, len(evictable)) or len(found) + num_pinned >= ITEMS_PER_ENTRY * most


def test_an_empty_queue() -> None:
    assert make_queue(Clock()).lowest(0.0) is None


def test_an_entry_that_leaves_before_its_due_time_stays_away() -> None:
    """Pinned entries leave the queue; the due time of an older push does not bring them back."""
    clock = Clock()
    queue, entry = make_queue(clock), Item(1.0, due=2.0, later=0.5, evictable=False)
    queue.push(entry)
    assert queue.lowest(0.0) is None
    clock.now, entry.evictable = 3.0, True
    entry.removed = True
    assert queue.lowest(3.0) is None


def test_entries_pushed_over_and_over_take_no_more_room() -> None:
    """A shared prefix that every request uses never gives way; its outdated items in the queue have to go, though."""
    clock = Clock()
    queue, entries = make_queue(clock), [Item(float(index)) for index in range(8)]
    for _ in range(5000):
        for entry in entries:
            entry.key, entry.due = entry.key + 1.0, clock.now + 1e9
            queue.push(entry)
    assert queue.num_items <= MIN_COMPACTED
    lowest = queue.lowest(clock.now)
    assert lowest is not None and lowest[1] is entries[0]

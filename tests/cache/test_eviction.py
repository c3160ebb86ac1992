"""What gives way first: the policies' order, and the queue that keeps it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.eviction import (
    EVICTION_POLICIES,
    CostPolicy,
    EntryFacts,
    EvictionQueue,
    LFUPolicy,
    LRUPolicy,
    RecomputeCost,
    make_policy,
)
from forkpoint.cache.tree import Origin

BASE = EntryFacts(
    origin=Origin.PROMPT_END,
    saved=1000.0,
    num_bytes=1 << 20,
    last_used=1.0,
    num_hits=0,
    num_expected=0,
    superseded=False,
)


def test_lru_looks_at_the_last_use() -> None:
    policy = LRUPolicy()
    assert policy.key(BASE) < policy.key(BASE._replace(last_used=1.1, saved=1.0))
    assert policy.key(BASE._replace(num_expected=1)) > policy.key(BASE._replace(last_used=1e9))


@pytest.mark.parametrize(
    "better",
    [
        {"saved": 2000.0},
        {"num_bytes": 1 << 19},
        {"last_used": 1.5},
        {"num_hits": 1},
        {"num_expected": 1},
        {"origin": Origin.JUNCTION},
    ],
    ids=str,
)
def test_cost_prefers(better: dict[str, object]) -> None:
    assert CostPolicy().key(BASE._replace(**better)) > CostPolicy().key(BASE)  # type: ignore[arg-type]


@pytest.mark.parametrize("worse", [{"superseded": True}, {"origin": Origin.INTERVAL}], ids=str)
def test_cost_gives_up_first(worse: dict[str, object]) -> None:
    assert CostPolicy().key(BASE._replace(**worse)) < CostPolicy().key(BASE)  # type: ignore[arg-type]


def test_a_used_entry_is_not_superseded() -> None:
    used = BASE._replace(num_hits=2)
    assert CostPolicy().key(used._replace(superseded=True)) == CostPolicy().key(used)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1, 1e9), st.floats(1, 1e9), st.floats(0, 50))
def test_the_order_does_not_change_as_time_passes(a: float, b: float, x: float, y: float, later: float) -> None:
    """The decay is common to all, so that keys need no refresh."""
    policy = CostPolicy()
    one, two = BASE._replace(last_used=a, saved=x), BASE._replace(last_used=b, saved=y)
    before = policy.key(one) - policy.key(two)
    after = policy.key(one._replace(last_used=a + later)) - policy.key(two._replace(last_used=b + later))
    assert after == pytest.approx(before, abs=1e-6)


def test_names() -> None:
    assert [make_policy(name).name for name in EVICTION_POLICIES] == ["cost", "lru", "lfu"]


def test_lfu_counts_hits_then_looks_at_the_last_use() -> None:
    key = LFUPolicy().key
    assert key(BASE) < key(BASE._replace(last_used=1.1)) < key(BASE._replace(num_hits=1, last_used=0.0))
    assert key(BASE._replace(num_expected=1)) > key(BASE._replace(num_hits=1000))


def test_recompute_cost_counts_attention() -> None:
    cost = RecomputeCost(per_token=2.0, per_pair=1.0)
    assert cost(0, 4) == 2.0 * 4 + (0 + 4) * 4 / 2
    assert cost(0, 2) + cost(2, 4) == cost(0, 4)


@dataclass(eq=False)
class Entry:
    key: float
    evictable: bool = True
    queue_entry: int = -1
    dropped: bool = False


def make_queue() -> EvictionQueue[Entry]:
    return EvictionQueue(lambda entry: entry.key, lambda entry: entry.evictable)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "raise", "lower", "drop", "pin", "unpin", "take"]),
            st.integers(0, 7),
            st.integers(0, 99),
        ),
        max_size=80,
    )
)
def test_the_lowest_evictable_entry_comes_first(ops: list[tuple[str, int, int]]) -> None:
    """Against a plain list. A key may rise without notice; one that falls, or an entry freed, is pushed again."""
    queue, entries = make_queue(), [Entry(float(index)) for index in range(8)]
    filed: set[int] = set()
    for op, index, value in ops:
        entry = entries[index]
        if op == "push" or (op == "unpin" and not entry.evictable):
            entry.evictable, entry.dropped = True, False
            queue.push(entry)
            filed.add(index)
        elif op == "raise":
            entry.key += value
        elif op == "lower":
            entry.key -= value
            queue.push(entry)
            filed.add(index)
        elif op == "drop":
            entry.dropped = True
        elif op == "pin":
            entry.evictable = False
        elif op == "take":
            found = queue.lowest()
            gone = {i for i in filed if entries[i].dropped or not entries[i].evictable}
            candidates = [entries[i].key for i in filed - gone]
            assert (found[0] if found else None) == min(candidates, default=None)
            if found:
                assert found[1].key == found[0]


def test_an_empty_queue() -> None:
    queue = make_queue()
    assert queue.lowest() is None
    queue.push(Entry(1.0))
    queue.clear()
    assert queue.lowest() is None


def test_a_conversation_that_went_on_before_is_kept_longer() -> None:
    key = CostPolicy().key
    keys = [key(BASE._replace(num_turns=turns)) for turns in range(5)]
    assert keys == sorted(keys) and keys[1] - keys[0] > keys[4] - keys[3] > 0


def test_recency_counts_by_the_learnt_distance() -> None:
    """Twice the saving makes up for one half-life."""
    key, half_life = CostPolicy().key, CostPolicy.HALF_LIFE * 0.5
    facts = BASE._replace(reuse_distance=0.5)
    older = facts._replace(last_used=1.0 - half_life, saved=2000.0)
    assert key(older) == pytest.approx(key(facts))


def test_refresh_orders_anew() -> None:
    queue, entries = make_queue(), [Entry(float(index)) for index in range(6)]
    for entry in entries:
        queue.push(entry)
    for index, entry in enumerate(entries):
        entry.key = float(-index)
    entries[5].dropped = True
    queue.refresh()
    found = queue.lowest()
    assert found is not None and found[1] is entries[4]

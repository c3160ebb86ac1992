"""Shared prefixes among histories, against counting every block of each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.hashing import BlockHash
from forkpoint.sched.interest import PrefixInterest

words = st.text("ab", max_size=6)


def history(word: str) -> list[BlockHash]:
    """Return hashes like chained ones: each stands for all tokens up to its end."""
    return [BlockHash(word[:end].encode()) for end in range(1, len(word) + 1)]


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 99), words), max_size=30), asked=st.lists(words, min_size=1)
)
def test_counts_are_those_of_all_blocks(steps: list[tuple[bool, int, str]], asked: list[str]) -> None:
    interest, waiting = PrefixInterest(), []
    for leaves, pick, word in steps:
        if leaves and waiting:
            interest.remove(history(waiting.pop(pick % len(waiting))))
        else:
            interest.add(history(word))
            waiting.append(word)
        blocks = Counter(block_hash for word in waiting for block_hash in history(word))
        for query in asked:
            assert list(interest.counts(history(query))) == [blocks[h] for h in history(query) if blocks[h]]
    for word in waiting:
        interest.remove(history(word))
    assert not interest._counts and not interest._rests


def test_what_is_not_shared_takes_one_place() -> None:
    interest = PrefixInterest()
    for word in ("a" * 50, "ab" + "a" * 50, "b" * 50):
        interest.add(history(word))
    assert len(interest._counts) == 1 and len(interest._rests) == 3

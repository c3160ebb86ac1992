"""Chained block hashes: one per full block, the same however the tokens arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cache.hashing import HASH_BYTES, HashChain, root_hash
from tests.sched.harness import tokens

SIZE = 64


def chain(*parts: np.ndarray, salt: str = "", owner: str = "", private_from: int | None = None) -> HashChain:
    made = HashChain(salt, owner, private_from)
    for part in parts:
        made.extend(part)
    return made


@given(cuts=st.lists(st.integers(0, 500), max_size=6), private=st.sampled_from([None, 0, 100, 128, 499]))
def test_any_split_gives_the_same_chain(cuts: list[int], private: int | None) -> None:
    ids = tokens(1, 500)
    parts = np.split(ids, sorted(cuts))
    split = chain(*parts, owner="a", private_from=private)
    whole = chain(ids, owner="a", private_from=private)
    assert split.hashes == whole.hashes and split.blocks == whole.blocks
    assert split.num_tokens == 500 and len(split.blocks) == 7
    assert all(len(block) == HASH_BYTES for block in split.hashes)


@given(at=st.integers(0, 255))
def test_a_changed_token_changes_its_block_and_all_later_ones(at: int) -> None:
    ids = tokens(1, 256)
    other = ids.copy()
    other[at] += 1
    same = [a == b for a, b in zip(chain(ids).hashes, chain(other).hashes, strict=True)]
    assert same == [index < at // SIZE for index in range(4)]


def test_equal_blocks_at_other_places_have_other_hashes() -> None:
    ids = np.tile(tokens(1, SIZE), 3)
    assert len(set(chain(ids).hashes)) == 3


def test_salts_share_nothing() -> None:
    ids = tokens(1, 256)
    assert not set(chain(ids, salt="a").hashes) & set(chain(ids, salt="b").hashes)
    assert root_hash("a") != root_hash("")


@pytest.mark.parametrize("owners", [("a", "b"), ("cmpl-8f3a-0", "cmpl-8f3a-1"), ("req-1", "req-10")])
def test_private_blocks_are_their_owners(owners: tuple[str, str]) -> None:
    """Blocks that hold a token at or after `private_from`; those before it are everyone's."""
    ids = tokens(1, 320)
    public = chain(ids)
    mine, yours = (chain(ids, owner=owner, private_from=150) for owner in owners)
    assert mine.hashes[:2] == yours.hashes[:2] == public.hashes[:2]
    assert not set(mine.hashes[2:]) & set(yours.hashes[2:])
    assert not set(mine.hashes[2:]) & set(public.hashes[2:])
    assert mine.hashes == chain(ids, owner=owners[0], private_from=150).hashes


def test_the_bytes_of_a_block() -> None:
    ids = tokens(1, 200)
    assert np.array_equal(np.frombuffer(chain(ids).blocks[1], np.int32), ids[64:128])

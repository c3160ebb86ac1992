"""Lookups: the longest reusable prefix, and why it is not longer. They change nothing."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.cache.ghosts import GhostKind, GhostTable
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Checkpoint, Node
from forkpoint.config import BLOCK_SIZE
from forkpoint.outputs import MissReason


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The result of a lookup.

    `path` are the nodes of the `num_tokens` reusable tokens. `checkpoint` is the state to start from; None if nothing
    is reused, or the layout has no states. Keys and values alone reach `kv_num_tokens`. `miss` says why the hit is
    shorter than possible; None if it is not. `junctions` are positions without a state at which this history parts from
    others. The first `num_ever_cached` tokens are cached, or were once.
    """

    num_tokens: int
    path: tuple[Node, ...]
    checkpoint: Checkpoint | None
    kv_num_tokens: int
    miss: MissReason | None
    junctions: frozenset[int] = frozenset()
    num_ever_cached: int = 0


NOTHING = PrefixHit(0, (), None, 0, MissReason.BYPASSED)


def find_prefix(chain: HashChain, length: int, store: PrefixStore) -> PrefixHit:
    """Return the longest reusable prefix of a history of `length` tokens, which never covers the last token."""
    layout, ghosts = store.layout, store.ghosts
    usable = layout.usable_prefix(length)
    if usable == 0:
        return PrefixHit(0, (), None, 0, MissReason.SHORT)
    path = store.tree.match(chain, usable // BLOCK_SIZE)
    kv_num_tokens = len(path) * BLOCK_SIZE
    checkpoint, num_tokens = None, kv_num_tokens
    if layout.has_states:
        checkpoint = next((node.checkpoint for node in reversed(path) if node.checkpoint is not None), None)
        num_tokens = checkpoint.num_tokens if checkpoint else 0
    ghost_blocks = len(path)
    while ghost_blocks < usable // BLOCK_SIZE and ghosts.get(chain.hashes[ghost_blocks]) is GhostKind.KV:
        ghost_blocks += 1
    junctions = {ghost_blocks * BLOCK_SIZE}  # an earlier history reached to here at least
    if path and path[-1].children:  # another history parts here, even if more of this one was evicted
        junctions.add(kv_num_tokens)
    lost = path[num_tokens // BLOCK_SIZE :]
    return PrefixHit(
        num_tokens=num_tokens,
        path=tuple(path[: num_tokens // BLOCK_SIZE]),
        checkpoint=checkpoint,
        kv_num_tokens=kv_num_tokens,
        miss=_explain(lost, num_tokens, usable, ghost_blocks > len(path), ghosts),
        junctions=frozenset(each for each in junctions if layout.has_states and num_tokens < each < usable),
        num_ever_cached=ghost_blocks * BLOCK_SIZE,
    )


def _explain(
    lost: list[Node], num_tokens: int, usable: int, next_was_evicted: bool, ghosts: GhostTable
) -> MissReason | None:
    """Return why a hit of `num_tokens` is shorter than `usable`; None if it is not.

    `lost` are the matched nodes beyond it; `next_was_evicted` is about the block after these.
    """
    if num_tokens == usable:
        return None
    if next_was_evicted or any(ghosts.get(node.hash) is GhostKind.CHECKPOINT for node in lost):
        return MissReason.EVICTED
    if lost:
        return MissReason.NO_CHECKPOINT
    return MissReason.COLD

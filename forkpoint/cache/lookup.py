"""Find the longest reusable prefix, and say why it is not longer. Pure: nothing is changed."""

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
    """The answer to a lookup.

    `path` are the nodes of the `num_tokens` reusable tokens, `checkpoint` the state to start from (None when
    nothing is reused, or for a layout without states). Keys and values alone reach `kv_num_tokens`. `miss`
    explains the tokens up to the longest possible hit (None: all of them are reused). `junctions` are
    positions where this history is seen to part from others and no state is kept. Up to `once_num_tokens` it is known
    to have been cached.
    """

    num_tokens: int
    path: tuple[Node, ...]
    checkpoint: Checkpoint | None
    kv_num_tokens: int
    miss: MissReason | None
    junctions: frozenset[int] = frozenset()
    once_num_tokens: int = 0


NOTHING = PrefixHit(0, (), None, 0, MissReason.BYPASSED)


def find_prefix(chain: HashChain, length: int, store: PrefixStore) -> PrefixHit:
    """Look up a prompt of `length` tokens; at least its last token is left to compute."""
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
    ends = {ghost_blocks * BLOCK_SIZE}
    if path and path[-1].children:  # others went on from here, whatever of this history was evicted
        ends.add(kv_num_tokens)
    lost = path[num_tokens // BLOCK_SIZE :]
    return PrefixHit(
        num_tokens=num_tokens,
        path=tuple(path[: num_tokens // BLOCK_SIZE]),
        checkpoint=checkpoint,
        kv_num_tokens=kv_num_tokens,
        miss=_explain(lost, num_tokens, usable, ghost_blocks > len(path), ghosts),
        junctions=frozenset(end for end in ends if num_tokens < end < usable) if layout.has_states else frozenset(),
        once_num_tokens=ghost_blocks * BLOCK_SIZE,
    )


def _explain(
    lost: list[Node], num_tokens: int, usable: int, next_was_evicted: bool, ghosts: GhostTable
) -> MissReason | None:
    """`lost` are the matched nodes beyond the hit; `next_was_evicted`: the next block was evicted."""
    if num_tokens == usable:
        return None
    if next_was_evicted or any(ghosts.get(node.hash) is GhostKind.CHECKPOINT for node in lost):
        return MissReason.EVICTED
    return MissReason.NO_CHECKPOINT if lost else MissReason.COLD

"""A listener at a cache's changes, through the wire's bytes, and what it must know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from forkpoint.cache.hashing import HashChain, block_hash, root_hash
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.tree import Node
from forkpoint.config import BLOCK_SIZE
from forkpoint.routing import wire
from forkpoint.routing.feed import RestorableIndex

MEDIA = {"host": "CPU", "disk": "STORAGE"}


class Listener:
    """Knows of a cache only what is published."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._watched = cache.watch_restorable()
        self.index = RestorableIndex()
        self.batches: list[wire.EventBatch] = []

    def listen(self) -> None:
        if changes := self._watched.drain():
            batch = wire.decode(wire.encode(wire.batch_of(changes, 0.0)))
            self.batches.append(batch)
            self.index.apply(batch)

    def check(self, prompts: Iterable[np.ndarray]) -> None:
        """What is published is what the tree has, and says of each prompt what a lookup finds."""
        self.listen()
        self._check_blocks()
        for prompt in prompts:
            self.check_prompt(prompt)

    def check_prompt(self, prompt: np.ndarray) -> None:
        cache, size = self._cache, BLOCK_SIZE
        hashes = sent_hashes(prompt)[: cache.layout.usable_prefix(len(prompt)) // size]
        found = cache.lookup(cache.new_lease("somebody", "", prompt), len(prompt)).num_tokens
        assert self.published_run(hashes) * size >= found
        for tier in filter(lambda tier: tier.is_open(), cache.tiers.all):
            node = tier.find(cache.new_lease("somebody", "", prompt).chain, len(hashes))
            found = max(found, node.depth * size if node is not None else 0)
        assert self.index.restorable(hashes) * size == found

    def published_run(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are published of the arena: what a router counts that knows no states."""
        return sum(1 for _ in takewhile(self.index._resumable["GPU"].__contains__, hashes))

    def _check_blocks(self) -> None:
        """A block is published exactly while a lookup in its room may end at or below it."""
        rooms = [("GPU", self._cache.store, True)]
        rooms += [(MEDIA[tier.name], tier.store, tier.is_open()) for tier in self._cache.tiers.all]
        for medium, store, is_open in rooms:
            expected = set()
            for node in store.tree.nodes() if is_open else ():
                if self._is_end(node, medium):
                    expected.update(wire.sent_hash(above.hash) for above in path_to(node))
            assert set(self.index._resumable[medium]) == expected

    def _is_end(self, node: Node, medium: str) -> bool:
        if node.condemned or not self._cache.enabled:
            return False
        if node.checkpoint is None and self._cache.layout.has_states:
            return False
        parent, path = root_hash(""), path_to(node)
        if medium == "STORAGE":  # without tokens
            assert path[0].parent is not None
            return path[0].parent.hash == parent
        return all(above.hash == (parent := block_hash(parent, above.tokens)) for above in path)  # nobody's own


def path_to(node: Node) -> list[Node]:
    """The nodes from depth 1 down to this one (empty for a root)."""
    return [*path_to(node.parent), node] if node.parent is not None else []


def sent_hashes(prompt: np.ndarray) -> list[int]:
    chain = HashChain("")
    chain.extend(prompt.astype(np.int32))
    return [wire.sent_hash(name) for name in chain.hashes]

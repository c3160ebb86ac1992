"""Other engines: computed prompts that they may fetch, and prompts that are fetched from them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.counters import CacheCounters
from forkpoint.cache.disk_entries import BLOCK, EntryName
from forkpoint.cache.disk_tier import name_of
from forkpoint.cache.fetched import FetchedPrompts
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.peer_offers import Fetch, Offer, PeerFacts
from forkpoint.cache.tier import unit_of
from forkpoint.cache.tree import Checkpoint, Node, Origin
from forkpoint.config import BLOCK_SIZE

HAS_OFFER: Final = "do_remote_prefill"  # of kv_transfer_params: another engine has computed this prompt
LOGGER: Final = logging.getLogger("forkpoint")


class PeerExchange:
    """Offers computed prompts to other engines, and reads the offers of others for `fetched`.

    `moves` is the list of copies that all rooms share. `has_unsent`: it has something new that no plan has carried.
    """

    def __init__(
        self,
        layout: CacheLayout,
        facts: PeerFacts,
        moves: list[Move],
        counters: CacheCounters,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._layout, self._facts, self._moves, self._counters = layout, facts, moves, counters
        self.fetched: FetchedPrompts | None = None
        if facts.allowed_hosts:
            self.fetched = FetchedPrompts(layout, facts, moves, counters, clock)
        self._leases = itertools.count(1)
        self._has_moves = False

    @property
    def has_unsent(self) -> bool:
        return self._has_moves or (self.fetched is not None and self.fetched.has_unsent)

    @property
    def is_fetching(self) -> bool:
        return self.fetched is not None and self.fetched.is_fetching

    def drain_fetches(self) -> tuple[Fetch, ...]:
        """Return the orders for the plan under construction, which carries all moves too."""
        self._has_moves = False
        return () if self.fetched is None else self.fetched.drain_orders()

    def offer(self, hit: PrefixHit) -> Offer | None:
        """Copy a computed prefix, with the next plan, to where other engines fetch it, and return the offer.

        None: nothing can be fetched here, or the prefix is empty.
        """
        if not self._facts.port or not hit.path:
            return None
        lease, end = next(self._leases), hit.path[-1]
        entries: list[tuple[Node, Checkpoint | None]] = []
        if self._layout.has_kv:
            entries += [(node, None) for node in hit.path]
        if hit.checkpoint is not None:
            entries.append((end, hit.checkpoint))
        for node, checkpoint in entries:
            kind, unit, num_bytes = unit_of(self._layout, node, checkpoint)
            self._moves.append(Move(kind, unit, 0, MoveRoute.OFFER, lease, name_of(node, checkpoint)))
            self._counters.peer_offered_bytes += num_bytes
        self._has_moves = True
        origin, decoded = Origin.PROMPT_END, False
        if hit.checkpoint is not None:
            origin, decoded = hit.checkpoint.origin, hit.checkpoint.decoded
        facts = self._facts
        place = (facts.engine_id, facts.host, facts.port, facts.namespace)
        return Offer(*place, lease, end.depth * BLOCK_SIZE, end.hash, origin, decoded)

    def read(self, params: Mapping[str, Any]) -> Offer | None:
        """Return the offer in a request's `kv_transfer_params`; None if there is none from another engine.

        A malformed one is logged and counted as a failed fetch, and None is returned.
        """
        if self.fetched is None or params.get(HAS_OFFER) is not True:
            return None
        try:
            offer = Offer.read(params)
        except ValueError as error:
            self._counters.peer_failed_fetches += 1
            LOGGER.warning("kv_transfer_params of a request are ignored and its prompt is computed: %s", error)
            return None
        return None if offer.engine_id == self._facts.engine_id else offer

    def withdraw(self, hashes: Iterable[BlockHash] | None = None) -> None:
        """Let nobody get entries of these hashes (None: any entries) any more, from the next plan on."""
        if not self._facts.port:
            return
        names: list[EntryName | None] = [None]
        if hashes is not None:
            names = [EntryName(BLOCK, each, b"", 0) for each in hashes]
        self._moves += [Move(MoveKind.BLOCK, 0, 0, MoveRoute.WITHDRAW, name=name) for name in names]
        self._has_moves = self._has_moves or bool(names)

    def reset(self) -> None:
        """Withdraw all offers and give up all fetches."""
        self.withdraw()
        if self.fetched is not None:
            self.fetched.reset()

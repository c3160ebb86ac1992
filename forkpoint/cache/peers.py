"""Other engines: computed prompts that they may fetch, and prompts that are fetched from them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.counters import CacheCounters
from forkpoint.cache.disk_tier import ORIGINS, name_of
from forkpoint.cache.fetched import FetchedPrompts
from forkpoint.cache.hashing import BlockHash, HashChain
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.peer_offers import Offer, PeerFacts
from forkpoint.cache.tier import unit_of, windows_of
from forkpoint.cache.tier_entries import BLOCK, EntryName
from forkpoint.cache.tree import Checkpoint, Entry, Node, Origin, path_below
from forkpoint.checks import is_loopback
from forkpoint.config import BLOCK_SIZE

HAS_OFFER: Final = "do_remote_prefill"  # field of kv_transfer_params: another engine has computed this prompt
SENT_ALONE: Final = (MoveRoute.OFFER, MoveRoute.WITHDRAW, MoveRoute.FORGET)  # moves that a plan without rows carries
LOGGER: Final = logging.getLogger("forkpoint")


@dataclass(slots=True)
class _OpenOffer:
    """An offer of a prompt that is still computed.

    The first `num_blocks` blocks of its path and the `state` at its end, if it is known, were copied by now. It
    `is_complete` once all entries were copied and results have confirmed them.
    """

    lease: int
    num_blocks: int = 0
    state: Checkpoint | None = None
    is_complete: bool = False


class PeerExchange:
    """Offers computed prompts to other engines, and reads the offers of others for `fetched`.

    `layout` is that of tiers, `moves` the list of copies that all rooms share.
    """

    def __init__(
        self,
        layout: CacheLayout,
        facts: PeerFacts,
        moves: list[Move],
        counters: CacheCounters,
        clock: Callable[[], float],
        tickets: Iterator[int] | None,
    ) -> None:
        """`tickets`: as in FetchedPrompts."""
        self._layout, self._facts, self._moves, self._counters = layout, facts, moves, counters
        self.fetched: FetchedPrompts | None = None
        if facts.allowed_hosts:
            self.fetched = FetchedPrompts(layout, facts, moves, counters, clock, tickets)
        self._leases = itertools.count(1)
        self._open: dict[str, _OpenOffer] = {}  # by request

    @property
    def offers(self) -> bool:
        """Whether other engines can fetch from this one."""
        return self._facts.port != 0

    @property
    def is_local(self) -> bool:
        """Whether only engines of this machine can fetch from this one."""
        return is_loopback(self._facts.host)

    @property
    def has_unsent(self) -> bool:
        """Whether there are orders, or moves for other engines, that no plan has carried yet."""
        has_moves = any(move.route in SENT_ALONE for move in self._moves)
        return has_moves or (self.fetched is not None and bool(self.fetched.orders))

    def offer_computed(self, request_id: str, node: Node, lease: int | None) -> None:
        """Copy the path to `node`, with the next plan, to where other engines fetch it.

        A request's later calls copy what has been computed since. `lease`: that of the offer, if a proxy chose it.
        """
        if self.offers and node.depth:
            self._copy_computed(self._offer_of(request_id, lease), node, None, lease)

    def offer_whole(self, request_id: str, hit: PrefixHit, lease: int | None, *, is_confirmed: bool) -> None:
        """Copy all that other engines can fetch of a prompt, and complete its offer if results have confirmed it."""
        if self.offers and hit.path:
            offer = self._offer_of(request_id, lease)
            self._copy_computed(offer, hit.path[-1], hit.checkpoint, lease)
            if is_confirmed:
                self._complete(offer)

    def _complete(self, offer: _OpenOffer) -> None:
        if not offer.is_complete:
            offer.is_complete = True
            self._moves.append(Move(MoveKind.BLOCK, 0, 0, MoveRoute.OFFER, offer.lease))

    def _offer_of(self, request_id: str, lease: int | None) -> _OpenOffer:
        found = self._open.get(request_id)
        if found is None:
            found = self._open[request_id] = _OpenOffer(lease or next(self._leases))
        return found

    def _copy_computed(self, offer: _OpenOffer, end: Node, state: Checkpoint | None, lease: int | None) -> None:
        """Add the copies of the path to `end` and of its state, as far as they were not added before."""
        if self._layout.has_kv:
            for node in path_below(offer.num_blocks, end):
                self._copy(offer.lease, node, name_of(node))
            offer.num_blocks = max(offer.num_blocks, end.depth)
        if state is not None and state is not offer.state:
            offer.state, name = state, name_of(state)
            if lease is not None:  # who asks early cannot know what the state is
                name = replace(name, origin=ORIGINS.index(Origin.PROMPT_END), decoded=False)
            self._copy(offer.lease, state, name)

    def _copy(self, lease: int, entry: Entry, name: EntryName) -> None:
        kind, unit, num_bytes = unit_of(self._layout, entry)
        self._moves.append(Move(kind, unit, 0, MoveRoute.OFFER, lease, name, windows=windows_of(entry)))
        self._counters.peer_offered_bytes += num_bytes

    def offer(self, request_id: str, hit: PrefixHit, lease: int | None) -> Offer | None:
        """Complete the offer of a request whose prompt has been computed, and return it.

        The next plan copies what no plan has copied yet. `lease` is as in `offer_computed`. None: nothing can be
        fetched here, or the prefix is empty.
        """
        if not self.offers or not hit.path:
            return None
        offer, end, state = self._offer_of(request_id, lease), hit.path[-1], hit.checkpoint
        self._copy_computed(offer, end, state, lease)
        origin, decoded = Origin.PROMPT_END, False
        if state is not None and lease is None:
            origin, decoded = state.origin, state.decoded
        self._complete(offer)
        del self._open[request_id]
        facts = self._facts
        place = (facts.engine_id, facts.host, facts.port, facts.namespace)
        return Offer(*place, offer.lease, end.depth * BLOCK_SIZE, end.hash, origin, decoded, facts.more_ports)

    def abandon(self, request_id: str, lease: int | None) -> None:
        """End the offer of a request that leaves before its prompt has been computed, so that nobody waits for it."""
        if not self.offers or (request_id not in self._open and lease is None):
            return
        offer = self._offer_of(request_id, lease)
        if not offer.is_complete:
            self.end_lease(offer.lease)
        del self._open[request_id]

    def end_lease(self, lease: int) -> None:
        """End an offer that has begun, or is expected, under a lease that a proxy chose."""
        if self.offers:
            self._moves.append(Move(MoveKind.BLOCK, 0, 0, MoveRoute.WITHDRAW, lease))

    def read(self, params: Mapping[str, Any], chain: HashChain, num_usable: int) -> Offer | None:
        """Return the offer in a request's `kv_transfer_params`; None if there is none from another engine.

        The request can use the first `num_usable` tokens of its prompt, whose hashes are in `chain`. A malformed offer
        is logged and counted as a failed fetch, and None is returned.
        """
        if self.fetched is None or params.get(HAS_OFFER) is not True:
            return None
        try:
            offer = Offer.read(params, chain.hashes, num_usable)
        except ValueError as error:
            self._counters.peer_failed_fetches += 1
            LOGGER.warning("kv_transfer_params of a request are ignored and its prompt is computed: %s", error)
            return None
        return None if offer.engine_id == self._facts.engine_id else offer

    def withdraw(self, hashes: Iterable[BlockHash] | None = None) -> None:
        """Let nobody get entries of these hashes (None: any entries) any more, from the next plan on."""
        if not self.offers:
            return
        names: list[EntryName | None] = [None]
        if hashes is not None:
            names = [EntryName(BLOCK, each, b"", 0) for each in hashes]
        self._moves += [Move(MoveKind.BLOCK, 0, 0, MoveRoute.WITHDRAW, name=name) for name in names]

    def reset(self) -> None:
        """Withdraw all offers and give up all fetches."""
        self.withdraw()
        self._open.clear()
        if self.fetched is not None:
            self.fetched.reset()

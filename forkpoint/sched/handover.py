"""Prefill/decode disaggregation: prompts that one engine computes and another one continues."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from forkpoint.cache.lookup import PrefixHit
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.peer_offers import WANTS_OFFER, asked_lease, chosen_lease
from forkpoint.cache.peers import PeerExchange
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.issued_step import IssuedStep
from forkpoint.sched.scheduled_request import ScheduledRequest

LOGGER: Final = logging.getLogger("forkpoint")


class Handover:
    """Offers the prompts of requests to other engines, and fetches for waiting requests what others offer."""

    def __init__(self, cache: CacheManager, issued: Collection[IssuedStep]) -> None:
        """`issued` are the steps in flight."""
        self._cache = cache
        self._issued = issued
        self._is_unexpected = False  # a request had kv_transfer_params, and this engine has no peers

    def take_up(self, scheduled: ScheduledRequest) -> None:
        """Fetch the offer in a waiting request's `kv_transfer_params`; decline it if this cache reaches as far."""
        request, lease, peers = scheduled.request, scheduled.lease, self._cache.tiers.peers
        params = request.params.kv_transfer_params
        if params and peers is None and not self._is_unexpected:
            self._is_unexpected = True
            LOGGER.warning(
                "kv_transfer_params of requests are ignored and all prompts are computed here; start the server with "
                "--kv-transfer-config and NixlConnector to exchange prompts"
            )
        if params is None or peers is None or not request.reads_cache:
            return
        usable = self._cache.layout.usable_prefix(request.num_tokens)
        offer, fetched, restoring = peers.read(params, lease.chain, usable), peers.fetched, self._cache.tiers.restoring
        if offer is None or fetched is None:
            return
        hit = self._cache.lookup(lease, request.num_tokens)
        longest, found = hit.num_tokens, restoring.find(lease, request.num_tokens, hit)
        if found is not None:
            longest = found[1].depth * BLOCK_SIZE
        if longest >= offer.num_tokens:
            fetched.decline(offer)
        else:
            fetched.take_up(lease, offer, usable, hit.kv_num_tokens)

    def offer_computed(self, scheduled: ScheduledRequest) -> None:
        """Offer what earlier plans have computed of a prompt, if its request asks for an offer.

        The offer is complete once results have confirmed all that another engine can fetch: it computes the prompt's
        last tokens itself.
        """
        peers, request, lease = self._offering(scheduled), scheduled.request, scheduled.lease
        if peers is None or lease.node is None or lease.detached:
            return
        chosen = chosen_lease(request.params.kv_transfer_params)
        usable = self._cache.layout.usable_prefix(request.num_prompt_tokens)
        if lease.num_planned < usable:
            peers.offer_computed(request.id, lease.node, chosen)
            return
        hit = self._cache.lookup(lease, request.num_prompt_tokens)
        if hit.num_tokens == usable:
            peers.offer_whole(request.id, hit, chosen, is_confirmed=not self._is_in_flight(hit))

    def offer(self, scheduled: ScheduledRequest) -> None:
        """Offer the prompt of a request that ends, if the request asks for that, in its `kv_transfer_params`."""
        request, peers = scheduled.request, self._offering(scheduled)
        if peers is None:
            return
        hit = self._cache.lookup(scheduled.lease, request.num_prompt_tokens)
        if self._is_in_flight(hit):
            return
        lease: int | None = None
        try:
            lease = asked_lease(request.params.kv_transfer_params or {})
        except ValueError as error:
            LOGGER.warning("a prompt is offered under a lease of the engine's own: %s", error)
        offer = peers.offer(request.id, hit, lease)
        if offer is not None:
            request.kv_transfer_params = offer.params(request.id)

    def abandon(self, scheduled: ScheduledRequest) -> None:
        """End the offer of a request that leaves, unless it is complete."""
        peers, request = self._offering(scheduled), scheduled.request
        if peers is not None and request.kv_transfer_params is None:
            peers.abandon(request.id, chosen_lease(request.params.kv_transfer_params))

    def _is_in_flight(self, hit: PrefixHit) -> bool:
        """Return whether a step in flight computes some of a hit, maybe for another request. It may fail."""
        filed = {entry for step in self._issued for entry in step.filed}
        return not filed.isdisjoint((*hit.path, hit.checkpoint))

    def _offering(self, scheduled: ScheduledRequest) -> PeerExchange | None:
        """Return the exchange with other engines if a request asks for an offer."""
        params = scheduled.request.params.kv_transfer_params
        if params is None or params.get(WANTS_OFFER) is not True:
            return None
        return self._cache.tiers.peers

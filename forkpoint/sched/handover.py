"""Prefill/decode disaggregation: prompts that one engine computes and another one continues."""

from __future__ import annotations

import logging
from typing import Final

from forkpoint.cache.manager import CacheManager
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.plan import StepResult
from forkpoint.sched.scheduled_request import ScheduledRequest

WANTS_OFFER: Final = "do_remote_decode"  # of kv_transfer_params: another engine will continue this prompt
LOGGER: Final = logging.getLogger("forkpoint")


class Handover:
    """Offers the prompts of requests to other engines, and fetches for waiting requests what others offer."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._is_unexpected = False  # a request had kv_transfer_params, and this engine has no peers

    def take_up(self, scheduled: ScheduledRequest) -> None:
        """Fetch the offer in a waiting request's `kv_transfer_params`; decline it if this cache reaches as far."""
        request, lease, peers = scheduled.request, scheduled.lease, self._cache.peers
        params = request.params.kv_transfer_params
        if params and peers is None and not self._is_unexpected:
            self._is_unexpected = True
            LOGGER.warning(
                "kv_transfer_params of requests are ignored and all prompts are computed here; start the server with "
                "--kv-transfer-config and NixlConnector to exchange prompts"
            )
        if params is None or peers is None or request.wants_prompt_logprobs:
            return
        offer, fetched, restoring = peers.read(params), peers.fetched, self._cache.restoring
        if offer is None or fetched is None or restoring is None:
            return
        hit = self._cache.lookup(lease, request.num_tokens)
        longest, in_tier = hit.num_tokens, restoring.find(lease, request.num_tokens, hit)
        if in_tier is not None:
            longest = in_tier[1].depth * BLOCK_SIZE
        if longest >= offer.num_tokens:
            fetched.decline(offer)
        else:
            fetched.take_up(lease, offer, self._cache.layout.usable_prefix(request.num_tokens), hit.kv_num_tokens)

    def offer(self, scheduled: ScheduledRequest) -> None:
        """Offer the prompt of a request that ends, if the request asks for that, in its `kv_transfer_params`."""
        request, peers = scheduled.request, self._cache.peers
        params = request.params.kv_transfer_params
        if params is None or peers is None or params.get(WANTS_OFFER) is not True:
            return
        offer = peers.offer(self._cache.lookup(scheduled.lease, request.num_prompt_tokens))
        if offer is not None:
            request.kv_transfer_params = offer.params(request.id)

    def note(self, result: StepResult) -> None:
        """Take in which fetches have ended."""
        if result.fetched is not None and self._cache.peers is not None and self._cache.peers.fetched is not None:
            self._cache.peers.fetched.apply(result.fetched)

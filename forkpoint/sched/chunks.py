"""Prefill in chunks: where a chunk ends, and which states it saves."""

from __future__ import annotations

from forkpoint.cache.capture import CaptureContext, CapturePolicy
from forkpoint.cache.manager import CacheManager
from forkpoint.cache.peer_offers import chosen_lease
from forkpoint.cache.peers import PeerExchange
from forkpoint.cache.policy_answers import checked_candidates
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.builder import PlanBuilder
from forkpoint.sched.encoder_budget import EncoderBudget
from forkpoint.sched.queue import WaitingQueue
from forkpoint.sched.request import Request
from forkpoint.sched.scheduled_request import ScheduledRequest

# If another engine fetches a prompt early, a chunk leaves this share of the tokens from its start to the prompt's end.
# Its blocks are fetched while the next chunk is computed, and the last chunk has few blocks. FEW_LEFT tokens at the end
# are one chunk. It may have FEW_LEFT_HERE if only engines of this machine can fetch the prompt: they take less time.
LEAST_LEFT_SHARE, FEW_LEFT, FEW_LEFT_HERE = 0.25, 1024, 2048


class Chunks:
    """Cuts prompts into chunks that fit a step's budgets, and plans the states that they save."""

    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        capture: CapturePolicy,
        interval: int,
        encoder: EncoderBudget | None,
    ) -> None:
        """`interval` is the distance in tokens between periodic states; 0 means there are none.

        `encoder` is None if requests have no images.
        """
        self._cache = cache
        self._waiting = waiting
        self._capture = capture
        self._interval = interval
        self._encoder = encoder

    def prefill_end(self, request: Request) -> int:
        """Return how many tokens go through the prefill kernels.

        Outputs of an earlier run are among them, except in deterministic mode, which replays them through the decode
        kernels.
        """
        if self._cache.deterministic:
            return request.num_prompt_tokens
        return request.num_tokens

    def end(self, request: Request, start: int, prefill_end: int, budget: int) -> int:
        """Return where a chunk from `start` of at most `budget` tokens ends: at `prefill_end` or a block boundary.

        Chunks get shorter towards the end if another engine may wait for their blocks, and one ends with the last block
        that it can fetch. Images whose turn in the vision tower has not come end a chunk earlier. The chunk is empty if
        the end is not after `start`: then the request has to wait for another step.
        """
        end, left = min(prefill_end, start + budget), prefill_end - start
        peers = self._cache.tiers.peers
        if peers is not None and self._is_fetched_early(request, peers):
            if left > (FEW_LEFT_HERE if peers.is_local else FEW_LEFT):
                end = min(end, prefill_end - int(left * LEAST_LEFT_SHARE))
            if start < (whole := self._cache.layout.usable_prefix(prefill_end)):
                end = min(end, whole)
        if end != prefill_end:
            end = end // BLOCK_SIZE * BLOCK_SIZE
        if self._encoder is not None and end > start:
            end = self._encoder.end(request.images, start, end)
        return end

    def _is_fetched_early(self, request: Request, peers: PeerExchange) -> bool:
        return peers.offers and chosen_lease(request.params.kv_transfer_params) is not None

    def add(self, builder: PlanBuilder, scheduled: ScheduledRequest, start: int, end: int) -> None:
        """Add the chunk `[start, end)` of a running request, which has blocks for it, to the plan.

        Its images are taken off the encoder's budget, and slots are taken for the states that it saves.
        """
        lease = scheduled.lease
        context = CaptureContext(
            start=start,
            end=end,
            prompt_end=scheduled.prefill_end,
            breakpoints=scheduled.request.breakpoints,
            junctions=scheduled.junctions,
            waiting_junctions=self._waiting.junctions(lease.chain.hashes, start, end),
            fallback_step=self._cache.fallback_step,
            num_survived_tokens=lease.num_survived_tokens,
            interval=self._interval,
        )
        if self._encoder is not None:
            self._encoder.take(scheduled.request.images, start, end)
        self._cache.filing.plan_saves(lease, start, end, checked_candidates(self._capture, context))
        builder.add_prefill(scheduled, end)

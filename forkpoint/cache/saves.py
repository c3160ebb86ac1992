"""Which states the plan under construction stores, and what it makes reusable."""

from __future__ import annotations

from collections.abc import Iterable

from forkpoint.cache.capture import Candidate
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.lease import Lease, PendingSave
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Origin, nearest_checkpoint


class SavePlanner:
    """Takes slots for the states that are worth one; the lease carries them until the plan is issued."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._layout = store.layout
        self.planned: dict[BlockHash, int] = {}  # boundaries, in tokens, that the next plan makes reusable

    def plan(self, lease: Lease, start: int, end: int, candidates: Iterable[Candidate]) -> None:
        """A chunk `[start, end)` is planned: take slots for the candidates that are worth it.

        No room means no checkpoint, counted. Without states every full block is reusable by itself.
        """
        if lease.frozen:
            return
        size, hashes = self._layout.block_size, lease.chain.hashes
        if not self._layout.has_states:
            last = min(end // size, len(hashes))
            self.planned.update((hashes[i], (i + 1) * size) for i in range(start // size, last))
            return
        for candidate in candidates:
            index = candidate.num_tokens // size - 1
            if index >= len(hashes) or hashes[index] in self.planned:
                continue
            present = self._store.tree.find(hashes[index])
            if present is not None and present.checkpoint is not None:
                continue
            self._plan_save(lease, candidate, hashes[index])
        lease.pending.sort(key=_num_tokens)

    def _plan_save(self, lease: Lease, candidate: Candidate, block_hash: BlockHash) -> None:
        save = PendingSave(candidate.num_tokens, candidate.origin)
        slot = self._take_slot(save, block_hash, lease, candidate.displaces)
        if slot is None:
            self._store.counters.checkpoints_skipped[candidate.origin] += 1
            if candidate.origin is Origin.PROMPT_END:
                self._store.policy.unsaved(block_hash, lease.note, self._store.arena.turnover)
            return
        save.slot = slot
        lease.pending.append(save)
        self.planned[block_hash] = candidate.num_tokens

    def _take_slot(self, save: PendingSave, block_hash: BlockHash, lease: Lease, displaces: bool) -> int | None:
        if not displaces:
            return self._store.arena.take_slot(save, compact=False)
        assert lease.node is not None
        pending = (other for other in lease.pending if other.num_tokens < save.num_tokens)
        above = max(pending, key=_num_tokens, default=None) or nearest_checkpoint(lease.node)
        key = self._store.candidate_key(block_hash, save.num_tokens, save.origin, lease.note, above)
        return self._store.take_slot(save, below=key)

    def reusable_soon(self, lease: Lease, limit: int) -> int:
        """How many tokens of this lease's history, at most `limit`, the plan under construction makes
        reusable for the next one."""
        size, hashes = self._layout.block_size, lease.chain.hashes
        fits = (
            num_tokens
            for block_hash, num_tokens in self.planned.items()
            if num_tokens <= min(limit, len(hashes) * size) and hashes[num_tokens // size - 1] == block_hash
        )
        return max(fits, default=0)

    def clear(self) -> None:
        """The plan is complete."""
        self.planned.clear()


def _num_tokens(save: PendingSave) -> int:
    return save.num_tokens

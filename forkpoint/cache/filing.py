"""Filing: the plan under construction takes slots for states, and enters blocks and states in the tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forkpoint.cache.capture import Candidate
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import TURN_ENDS, Checkpoint, Entry, Node, Origin, nearest_checkpoint
from forkpoint.config import BLOCK_SIZE


class Filing:
    """Takes slots for states that are worth one, and files blocks and saves under their histories.

    A lease carries its saves until the plan is committed.

    Others read `filed`, what was filed since the last plan was issued, and `reusable_next`: the boundaries, in tokens,
    that the plan under construction makes reusable for the next one.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._layout = store.layout
        self.filed: list[Entry] = []
        self.reusable_next: dict[BlockHash, int] = {}

    def plan_saves(self, lease: Lease, start: int, end: int, candidates: Iterable[Candidate]) -> None:
        """Take slots for the candidates of the chunk `[start, end)` that are worth one, as `lease.saves`.

        A boundary that has a checkpoint or a save is skipped. A candidate without room is only counted. In a layout
        without states every full block becomes reusable. A detached lease plans nothing.
        """
        if lease.detached:
            return
        hashes = lease.chain.hashes
        if not self._layout.has_states:
            last = min(end // BLOCK_SIZE, len(hashes))
            self.reusable_next.update((hashes[i], (i + 1) * BLOCK_SIZE) for i in range(start // BLOCK_SIZE, last))
            return
        for candidate in candidates:
            index = candidate.num_tokens // BLOCK_SIZE - 1
            if index >= len(hashes) or hashes[index] in self.reusable_next:
                continue
            present = self._store.tree.find(hashes[index])
            if present is not None and present.checkpoint is not None:
                continue
            self._save_candidate(lease, candidate, hashes[index])
        lease.saves.sort(key=_num_tokens)

    def _save_candidate(self, lease: Lease, candidate: Candidate, block_hash: BlockHash) -> None:
        save = StateSave(candidate.num_tokens, candidate.origin)
        if candidate.may_evict:
            slot = self.take_slot(lease, save, block_hash, save)
        else:
            slot = self._store.arena.take_slot(save, compact=False)
        if slot is None:
            self._store.counters.checkpoints_skipped[candidate.origin] += 1
            if candidate.origin is Origin.PROMPT_END:
                self._store.policy.skipped(block_hash, lease.note, self._store.arena.turnover)
            return
        self.plan_save(lease, save, slot)
        self.reusable_next[block_hash] = candidate.num_tokens

    def plan_save(self, lease: Lease, save: StateSave, slot: int) -> None:
        """Let the plan under construction store the state in `slot`."""
        save.slot = slot
        lease.saves.append(save)

    def drop_saves(self, lease: Lease) -> None:
        """Give back the slots of the lease's saves."""
        for save in lease.saves:
            self._store.arena.give_slot(save.slot)
        lease.saves.clear()

    def take_slot(self, lease: Lease, save: StateSave, block_hash: BlockHash, owner: Lease | StateSave) -> int | None:
        """Return a slot for `owner` if the state to save is worth more than what is evicted for it, else None."""
        earlier = (other for other in lease.saves if other.num_tokens < save.num_tokens)
        above = max(earlier, key=_num_tokens, default=None) or nearest_checkpoint(lease.node)
        key = self._store.keys.of_candidate(block_hash, save.num_tokens, save.origin, lease.note, above)
        return self._store.take_slot(owner, below=key)

    def longest_reusable_next(self, lease: Lease, limit: int) -> int:
        """Return how many tokens of the lease's history, at most `limit`, this plan makes reusable for the next one."""
        hashes = lease.chain.hashes
        fits = (
            num_tokens
            for block_hash, num_tokens in self.reusable_next.items()
            if num_tokens <= min(limit, len(hashes) * BLOCK_SIZE) and hashes[num_tokens // BLOCK_SIZE - 1] == block_hash
        )
        return max(fits, default=0)

    def publish(self, lease: Lease, num_tokens: int) -> None:
        """File the lease's full blocks up to `num_tokens` tokens, and the saves whose blocks are filed.

        The other saves give their slots back. The lease then pins the deepest of its nodes.
        """
        saves = {save.num_tokens // BLOCK_SIZE: save for save in lease.saves}
        lease.saves.clear()
        old = node = lease.node
        assert old is not None and node is not None
        last = min(num_tokens, lease.chain.num_tokens) // BLOCK_SIZE
        for depth in sorted({last, *saves}):
            node = self._file_blocks(lease, node, min(depth, last))
            if node.depth == depth and (save := saves.pop(depth, None)):
                self.file_checkpoint(lease, node, save)
        if node is not old:
            self._store.tree.pin(node)
            self._store.unpin(old)
            lease.node = node
        for save in saves.values():
            self._store.arena.give_slot(save.slot)

    def _file_blocks(self, lease: Lease, node: Node, last: int) -> Node:
        """Follow the lease's history from `node` down to depth `last`, file new blocks, and return the deepest node.

        The lease is detached if the rest cannot be filed.
        """
        node = self._follow(lease, node, last)
        start = end = node.depth
        if lease.detached or start >= last:
            return node
        if not node.condemned:
            while end < last and (end in lease.own_blocks or not self._layout.has_kv):
                end += 1
        lease.detached = end < last
        if start == end:
            return node
        blocks = lease.pop_blocks(range(start, end)) if self._layout.has_kv else [NO_BLOCK] * (end - start)
        chain = lease.chain
        nodes = self._store.add_blocks(node, chain.hashes[start:end], chain.blocks[start:end], blocks)
        self._note_filed(lease, nodes)
        return nodes[-1]

    def _follow(self, lease: Lease, node: Node, last: int) -> Node:
        """Follow the lease's history from `node`, to depth `last` or as far as the tree has it; return the last node.

        The lease is detached if a node of the same hash has another history.
        """
        hashes, find = lease.chain.hashes, self._store.tree.find
        while not lease.detached and node.depth < last and (present := find(hashes[node.depth])) is not None:
            lease.has_duplicates = lease.has_duplicates or node.depth in lease.own_blocks
            if present.parent is not node or present.tokens != lease.chain.blocks[node.depth]:
                lease.detached = True
                break
            node = present
        return node

    def _note_filed(self, lease: Lease, items: Sequence[Entry]) -> None:
        lease.filed += items
        self.filed += items

    def file_checkpoint(self, lease: Lease, node: Node, save: StateSave, is_read: bool = False) -> Checkpoint | None:
        """Make the saved state the checkpoint of `node`, and return it; None if the present checkpoint stays.

        `is_read`: the next plan reads it.

        The end of a turn supersedes the checkpoint that the turn went on from.
        """
        windows = self._store.windows.run(lease.windows, node.depth, save.num_tokens)
        checkpoint = self._store.add_checkpoint(
            node, save.slot, save.origin, lease.decoded, lease.note, is_read, windows
        )
        if checkpoint is None:
            return None
        lease.touched.append(checkpoint)
        self._note_filed(lease, [checkpoint])
        if save.origin is Origin.DECODE:
            lease.decode_checkpoint = checkpoint
        hit = lease.hit
        if hit and not hit.superseded and hit.origin is not Origin.FALLBACK and save.origin in TURN_ENDS:
            self._store.supersede(hit)
        return checkpoint

    def drain(self) -> list[Entry]:
        """Return what was filed since the last call, and forget `reusable_next`. Call it when a plan is complete."""
        filed, self.filed = self.filed, []
        self.reusable_next.clear()
        return filed


def _num_tokens(save: StateSave) -> int:
    return save.num_tokens

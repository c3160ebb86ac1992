"""What requests compute, filed in the tree."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.cache.layout import NO_BLOCK
from forkpoint.cache.lease import Lease, PendingSave
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import TURN_ENDS, Checkpoint, Node, Origin


class Filing:
    """Files the blocks and saves of leases under their histories, and remembers what the plan under construction
    files."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._layout = store.layout
        self.filed: list[Node | Checkpoint] = []  # since the last plan was issued

    def publish(self, lease: Lease, num_tokens: int) -> None:
        """File the blocks up to `num_tokens` tokens, and the pending saves, in the tree.

        To be called when the plan that computes them is issued.
        """
        saves = {save.num_tokens // self._layout.block_size: save for save in lease.pending}
        lease.pending.clear()
        old = node = lease.node
        assert old is not None and node is not None
        last = min(num_tokens, lease.chain.num_tokens) // self._layout.block_size
        for depth in sorted({last, *saves}):
            node = self._file_blocks(lease, node, min(depth, last))
            if node.depth == depth and (save := saves.pop(depth, None)):
                self._finish_save(lease, node, save)
        if node is not old:
            self._store.tree.pin(node)
            self._store.unpin(old)
            lease.node = node
        for save in saves.values():
            self._store.arena.give_slot(save.slot)

    def _file_blocks(self, lease: Lease, node: Node, last: int) -> Node:
        """Go down from `node` on the lease's history to depth `last`, and file the blocks that are new.

        Returns the deepest node; the lease is frozen if the rest cannot be filed.
        """
        node = self._follow(lease, node, last)
        start = end = node.depth
        if lease.frozen or start >= last:
            return node
        if not node.condemned:
            while end < last and (end in lease.own_blocks or not self._layout.has_kv):
                end += 1
        lease.frozen = end < last
        if start == end:
            return node
        blocks = lease.pop_blocks(range(start, end)) if self._layout.has_kv else [NO_BLOCK] * (end - start)
        chain = lease.chain
        nodes = self._store.add_blocks(node, chain.hashes[start:end], chain.blocks[start:end], blocks)
        self._note_filed(lease, nodes)
        return nodes[-1]

    def _follow(self, lease: Lease, node: Node, last: int) -> Node:
        """Go down from `node` on the lease's history, to depth `last` or as far as the tree has it."""
        hashes, find = lease.chain.hashes, self._store.tree.find
        while not lease.frozen and node.depth < last and (present := find(hashes[node.depth])) is not None:
            lease.has_duplicates = lease.has_duplicates or node.depth in lease.own_blocks
            if present.parent is not node or present.tokens != lease.chain.blocks[node.depth]:
                lease.frozen = True
                break
            node = present
        return node

    def _note_filed(self, lease: Lease, items: Sequence[Node | Checkpoint]) -> None:
        lease.made += items
        self.filed += items

    def _finish_save(self, lease: Lease, node: Node, save: PendingSave) -> None:
        checkpoint = self._store.add_checkpoint(node, save.slot, save.origin, lease.decoded, lease.note)
        if checkpoint is not None:
            self.adopt(lease, checkpoint)
            if save.origin is Origin.DECODE:
                lease.decode_checkpoint = checkpoint

    def adopt(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """A checkpoint is of the lease's making; the end of a turn supersedes the one that the turn went on from."""
        lease.touched.append(checkpoint)
        self._note_filed(lease, [checkpoint])
        hit = lease.hit
        if hit is None or hit.superseded or hit.origin is Origin.FALLBACK or checkpoint.origin not in TURN_ENDS:
            return
        self._store.supersede(hit)

    def drain(self) -> list[Node | Checkpoint]:
        """What was filed since the last call: it is computed by the plan now issued, or by earlier ones."""
        filed, self.filed = self.filed, []
        return filed

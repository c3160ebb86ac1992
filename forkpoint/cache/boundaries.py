"""Decode boundaries: a decoding row keeps its state at the boundaries of blocks."""

from __future__ import annotations

from forkpoint.cache.filing import Filing
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import Origin
from forkpoint.config import BLOCK_SIZE


class DecodeBoundaries:
    """Files the blocks that decoding rows complete, and keeps their states there. It alone writes `Lease.in_reach`.

    A boundary is in reach if drafts in flight decide whether the row comes to it.
    """

    def __init__(self, store: PrefixStore, filing: Filing) -> None:
        self._store = store
        self._filing = filing

    def cross(self, lease: Lease) -> bool:
        """Keep the state at the newest block boundary of a decoding row, and file the block before the boundary.

        The row starts its next step at the boundary or has just passed it. `lease.chain` must have the planned tokens
        that are known; a boundary beyond them is in reach. If the row starts at a boundary that is not in reach, its
        running slot becomes the checkpoint, and it gets another slot. In all other cases the next plan saves the state.
        Returns False if the boundary is in reach and there is no slot: then plan the row once the result is back.
        """
        self._filing.publish(lease, lease.num_planned)
        if lease.detached:
            return True
        node = lease.node
        assert node is not None
        boundary = lease.num_planned // BLOCK_SIZE * BLOCK_SIZE
        lease.in_reach = boundary > lease.chain.num_tokens
        if not self._store.layout.has_states or lease.read_from is not None:
            return True
        if not lease.in_reach and (node.depth * BLOCK_SIZE != boundary or node.checkpoint is not None):
            return True
        save = StateSave(boundary, Origin.DECODE)
        switches = boundary == lease.num_planned and not lease.in_reach
        fresh = self._fresh_slot(lease, save, lease if switches else save)
        if fresh is None:
            self._store.counters.checkpoints_skipped[Origin.DECODE] += not lease.in_reach
            return not lease.in_reach
        if switches:
            save.slot = lease.slot
            lease.switch_slot(fresh, self._filing.file_checkpoint(lease, node, save, is_read=True))
        else:
            self._filing.plan_save(lease, save, fresh)
        return True

    def resolve(self, lease: Lease) -> None:
        """File what the last plan stored at the boundary in reach if the row came to it, or else give the slot back.

        Does nothing if no boundary is in reach.
        """
        if not lease.in_reach:
            return
        previous = lease.decode_checkpoint
        self._filing.publish(lease, lease.num_planned - lease.num_last_step)
        lease.in_reach = False
        if previous is not None and lease.decode_checkpoint is not previous and previous.is_spare:
            self._store.drop_checkpoint(previous)

    def _fresh_slot(self, lease: Lease, save: StateSave, owner: Lease | StateSave) -> int | None:
        """Return a slot for the next decode checkpoint, owned by `owner`; None if there is no room.

        The request's previous decode checkpoint gives up its slot, unless it is used or the row may not come to the
        next boundary.
        """
        previous, node = lease.decode_checkpoint, lease.node
        assert node is not None
        if previous is not None and not lease.in_reach and previous.is_spare:
            slot = previous.slot
            self._store.drop_checkpoint(previous, keep_slot=True)
            self._store.arena.slots.transfer([slot], [owner])
            return slot
        return self._filing.take_slot(lease, save, node.hash, owner)  # a block in reach has no hash yet

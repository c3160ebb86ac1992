"""What the replicas' events say about where prompts can resume."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.routing.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


class RestorableIndex:
    """The blocks that one replica has published. Hashes are those of `wire.sent_hash`."""

    def __init__(self) -> None:
        self._resumable: dict[int | bytes, bool] = {}  # of each published block: whether a request can resume there

    def __len__(self) -> int:
        return len(self._resumable)

    def apply(self, batch: EventBatch) -> None:
        """Take in a batch; batches come in order."""
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes, resumable_hashes=ends):
                    self._resumable.update(dict.fromkeys(hashes, ends is None))
                    self._resumable.update(dict.fromkeys(ends or (), True))
                case BlockRemoved(block_hashes=hashes):
                    for name in hashes:
                        self._resumable.pop(name, None)
                case AllBlocksCleared():
                    self._resumable.clear()

    def published_run(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are published: what a router that knows of no states counts.

        With a block all that come before it are published, so a few looks are enough.
        """
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._resumable:
                low = middle
            else:
                high = middle - 1
        return low

    def restorable(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks a request could take from the cache."""
        num_blocks = self.published_run(hashes)
        while num_blocks and not self._resumable.get(hashes[num_blocks - 1]):
            num_blocks -= 1
        return num_blocks

"""What one request holds of the cache and the arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forkpoint.cache.arena import Move, MoveKind
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.layout import NO_BLOCK, NO_SLOT
from forkpoint.cache.tree import Checkpoint, Node, Origin


@dataclass(slots=True, eq=False)
class StateSave:
    """A slot taken for a state that a plan under construction will store; it becomes a checkpoint at issue."""

    num_tokens: int
    origin: Origin
    slot: int = NO_SLOT

    def rebind(self, move: Move) -> None:
        assert self.slot == move.src
        self.slot = move.dst


@dataclass(slots=True, eq=False)
class Lease:
    """A request's share. Written by CacheManager and its part, Filing; the scheduler confirms what
    was sampled and freezes what failed.

    The request's block table has `num_blocks` blocks: those of the nodes down to `node` except where `own_blocks` has
    one, and `own_blocks` beyond. `node` is the deepest node of the request's own history, pinned.

    The plans issued so far compute `num_planned` tokens; of these, results have confirmed `num_confirmed`. Where a
    step confirmed fewer than were planned, the planned ones beyond are as if they had never been. The state after
    `num_planned` tokens is in `read_from` (a checkpoint, not to be written) or else in `slot`. Where the last plan may
    have passed a block boundary (`in_reach`), `saves` has what it saves there if it does.
    """

    owner: str
    chain: HashChain
    node: Node | None = None
    num_blocks: int = 0
    num_sent_blocks: int = 0  # of those, blocks that the row has before the next plan's new ones
    own_blocks: dict[int, int] = field(default_factory=dict)  # index in the table -> block
    slot: int = NO_SLOT
    read_from: Checkpoint | None = None
    num_planned: int = 0
    num_confirmed: int = 0
    num_last_step: int = 1  # tokens of the last step of a row that decodes, without drafts known not to count
    in_reach: bool = False
    decoded: bool = False  # decode kernels had a part in the state
    saves: list[StateSave] = field(default_factory=list)
    hit: Checkpoint | None = None
    note: object = None  # the eviction policy's
    num_survived_tokens: int = 0  # where the conversation had lost its end: how far its keys and values reached
    decode_checkpoint: Checkpoint | None = None
    touched: list[Checkpoint] = field(default_factory=list)  # hit or made by this request
    filed: list[Node | Checkpoint] = field(default_factory=list)  # filed by this request
    has_duplicates: bool = False  # some of `own_blocks` are above `node`: the tree has them too
    detached: bool = False  # files nothing any more

    def rebind(self, move: Move) -> None:
        """Compaction moved a block that this lease owns, or the running slot."""
        if move.kind is MoveKind.SLOT:
            assert self.slot == move.src
            self.slot = move.dst
            return
        index = next(index for index, block in self.own_blocks.items() if block == move.src)
        self.own_blocks[index] = move.dst

    def pop_blocks(self, indices: Iterable[int]) -> list[int]:
        """Take these of its own blocks from the lease."""
        return [self.own_blocks.pop(index) for index in indices]

    def block_ids(self, start: int, end: int) -> list[int]:
        """The ids of blocks `[start, end)` of the row's table."""
        ids = [NO_BLOCK] * (end - start)
        node = self.node
        while node is not None and node.depth > start:
            if node.depth <= end:
                ids[node.depth - 1 - start] = node.block
            node = node.parent
        for index, block in self.own_blocks.items():
            if start <= index < end:
                ids[index - start] = block
        return ids

"""What one request holds of the cache and the arena."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkpoint.cache.hashing import HashChain
from forkpoint.cache.reuse import Turn
from forkpoint.cache.tree import NO_UNIT, OF_CONVERSATION, Checkpoint, Node, Origin, Provenance


@dataclass(slots=True, eq=False)
class PendingSave:
    """A slot taken for a state that a plan under construction will store; it becomes a checkpoint at issue."""

    num_tokens: int
    origin: Origin
    slot: int = NO_UNIT

    def rebind(self, old: int, new: int) -> None:
        assert self.slot == old
        self.slot = new


@dataclass(slots=True, eq=False)
class Lease:
    """A request's share. Written by CacheManager alone.

    The request's block table has `num_blocks` blocks: those of `node.path()` except where `own_blocks` has
    one, and `own_blocks` beyond. `node` is the deepest node of the request's own history, pinned. The state
    after `state_tokens` tokens is in `read_from` (a checkpoint, not to be written) or else in `slot`.
    """

    owner: str
    chain: HashChain
    node: Node | None = None
    num_blocks: int = 0
    num_told_blocks: int = 0  # of those, blocks that the row has before the next chunk's new ones
    own_blocks: dict[int, int] = field(default_factory=dict)  # index in the table -> block
    slot: int = NO_UNIT
    read_from: Checkpoint | None = None
    state_tokens: int = 0
    provenance: Provenance = Provenance.PREFILL
    pending: list[PendingSave] = field(default_factory=list)
    hit: Checkpoint | None = None
    num_new_tokens: int = 0  # of the prompt, those that were not the history of its conversation
    num_lost_turns: int = 0  # those that the conversation had when it lost its last checkpoint
    num_survived_tokens: int = 0  # how far its keys and values then reached
    decode_checkpoint: Checkpoint | None = None
    touched: list[Checkpoint] = field(default_factory=list)  # hit or made by this request
    made: list[Node | Checkpoint] = field(default_factory=list)  # filed by this request
    has_duplicates: bool = False  # some of `own_blocks` are above `node`: the tree has them too
    frozen: bool = False  # files nothing any more

    @property
    def turn(self) -> Turn:
        """The turn of its conversation that this request is, going by checkpoints, lost ones too."""
        hit = self.hit
        known = hit.turn.number + 1 if hit is not None and hit.origin in (*OF_CONVERSATION, Origin.NEAR_END) else 0
        return Turn(max(known, self.num_lost_turns), self.num_new_tokens)

    def rebind(self, old: int, new: int) -> None:
        """Compaction moved a unit that this lease owns (a block, or the running slot)."""
        for index, block in self.own_blocks.items():
            if block == old:
                self.own_blocks[index] = new
                return
        raise AssertionError(f"{self.owner} does not own block {old}")

    def block_ids(self, start: int, end: int) -> list[int]:
        """The ids of blocks `[start, end)` of the row's table."""
        ids = [NO_UNIT] * (end - start)
        node = self.node
        while node is not None and node.depth > start:
            if node.depth <= end:
                ids[node.depth - 1 - start] = node.block
            node = node.parent
        for index, block in self.own_blocks.items():
            if start <= index < end:
                ids[index - start] = block
        return ids


@dataclass(slots=True, eq=False)
class RunningSlot:
    """The owner of a lease's running slot, so that compaction can tell slots from blocks."""

    lease: Lease

    def rebind(self, old: int, new: int) -> None:
        assert self.lease.slot == old
        self.lease.slot = new

"""The lease: one request's share of the cache and the arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from forkpoint.cache.arena import Move, MoveKind
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.layout import NO_BLOCK, NO_SLOT
from forkpoint.cache.tree import Checkpoint, Entry, Node, Origin
from forkpoint.cache.windows import WindowRow

NOT_DECODED: Final = -1  # instead of a position: the row has had no decode step


@dataclass(slots=True, eq=False)
class StateSave:
    """A slot taken for a state that the plan under construction stores. It becomes a checkpoint when it is filed."""

    num_tokens: int
    origin: Origin
    slot: int = NO_SLOT

    def rebind(self, move: Move) -> None:
        assert self.slot == move.src
        self.slot = move.dst


@dataclass(slots=True, eq=False)
class Lease:
    """A request's share of the cache.

    CacheManager writes it, except for what a request files: Filing writes `saves`, `filed` and `decode_checkpoint`, and
    moves `node` down. DecodeBoundaries writes `in_reach`. The scheduler writes only `num_confirmed` and `detached`,
    and adds fetched nodes to `filed`. Everybody else calls its methods.

    The request's block table has `num_blocks` blocks: `own_blocks` by their index in the table, and for every other
    index the block of the node on the way down to `node`. `node` is the deepest node of the request's own history; it
    is pinned. `windows` are the tables of `layout.windows`, which may reach further than `num_blocks`.

    The plans issued so far compute `num_planned` tokens; results have confirmed `num_confirmed` of them. The state
    after `num_planned` tokens is in the checkpoint `read_from`, which must not be written, or otherwise in `slot`.
    `saves` are the states that the next plan stores. The save of a boundary in reach (`in_reach`) counts only if the
    row comes to it.

    The state in `slot` may lag. After a step with drafts it lacks the `num_pending` tokens of that step, which are in
    the worker's records. `num_written` (sched) counts the tokens of a state that is written every few tokens.
    """

    owner: str
    chain: HashChain
    node: Node | None = None
    windows: list[WindowRow] = field(default_factory=list)
    num_blocks: int = 0
    num_sent_blocks: int = 0  # blocks that the worker already has; the next plan sends the rest
    own_blocks: dict[int, int] = field(default_factory=dict)  # index in the table -> block
    slot: int = NO_SLOT
    read_from: Checkpoint | None = None
    num_planned: int = 0
    num_confirmed: int = 0
    num_last_step: int = 1  # tokens of the row's last decode step, minus rejected drafts
    num_pending: int = 0  # tokens of the last step if it had drafts, minus rejected drafts; otherwise 0
    first_decode: int = NOT_DECODED  # where the first decode step of this run started, with a whole state
    in_reach: bool = False
    decoded: bool = False  # decode kernels computed a part of the state
    saves: list[StateSave] = field(default_factory=list)
    hit: Checkpoint | None = None
    note: object = None  # the eviction policy's note
    num_survived_tokens: int = 0  # if the conversation's end was evicted: how far its keys and values reached; else 0
    decode_checkpoint: Checkpoint | None = None  # the newest one at a boundary that the row decoded past
    touched: list[Checkpoint] = field(default_factory=list)  # checkpoints that this request hit or saved
    filed: list[Entry] = field(default_factory=list)  # entries that this request filed or fetched
    has_duplicates: bool = False  # the tree has some of `own_blocks` too
    detached: bool = False  # whether the lease files nothing more

    @property
    def read_slot(self) -> int:
        """The slot with the state that the next step starts from; NO_SLOT for the zero state."""
        if self.read_from is not None:
            return self.read_from.slot
        if self.num_planned:
            return self.slot
        return NO_SLOT

    def advance(self, end: int, decodes: bool) -> Checkpoint | None:
        """Count the tokens up to `end` as planned, and the table's blocks as sent; `decodes`: in a decode step.

        Returns the checkpoint that the plan reads, if any. Call `CacheManager.done_reading` with it once the step's
        result is there.
        """
        reading, self.read_from = self.read_from, None
        self.num_last_step, self.num_pending = 1, 0
        if decodes:
            if self.first_decode == NOT_DECODED:
                self.first_decode = self.num_planned
            self.num_last_step = end - self.num_planned
            if self.num_last_step > 1:
                self.num_pending = self.num_last_step
            self.decoded = True
        self.num_planned = end
        self.num_sent_blocks = self.num_blocks
        return reading

    def switch_slot(self, slot: int, checkpoint: Checkpoint | None) -> None:
        """Run in another slot from now on. The next step reads `checkpoint`, which the old slot has become."""
        self.slot, self.read_from = slot, checkpoint

    def confirm(self, end: int) -> None:
        """Count the tokens up to `end` as confirmed. The lease may have jumped further since that step was planned."""
        self.num_confirmed = max(self.num_confirmed, end)

    def reject(self, num_rejected: int, in_last_step: bool) -> None:
        """Take rejected drafts off the planned tokens; `in_last_step` says whether the row's last step had them."""
        self.num_planned -= num_rejected
        if in_last_step:
            self.num_last_step -= num_rejected
            self.num_pending -= num_rejected

    def rebind(self, move: Move) -> None:
        """Follow compaction, which moved a block that this lease owns or the running slot."""
        if move.kind is MoveKind.SLOT:
            assert self.slot == move.src
            self.slot = move.dst
            return
        index = next(index for index, block in self.own_blocks.items() if block == move.src)
        self.own_blocks[index] = move.dst

    @property
    def first_position(self) -> int:
        """The first position that a later plan may compute or save, if all drafts in flight are rejected."""
        return min(self.num_planned - self.num_last_step + 1, *(save.num_tokens for save in self.saves), 1 << 62)

    def pop_blocks(self, indices: Iterable[int]) -> list[int]:
        """Remove these of its own blocks, given by index, from the lease and return their ids."""
        return [self.own_blocks.pop(index) for index in indices]

    def block_ids(self, start: int, end: int) -> list[int]:
        """Return the ids of blocks `[start, end)` of the request's table; NO_BLOCK where it has none."""
        ids = [NO_BLOCK] * (end - start)
        node = self.node
        while node is not None and node.depth > end:
            node = node.parent
        while node is not None and node.depth > start:
            ids[node.depth - 1 - start] = node.block
            node = node.parent
        for index, block in self.own_blocks.items():
            if start <= index < end:
                ids[index - start] = block
        return ids

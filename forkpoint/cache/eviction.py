"""Eviction policies: what they know of an entry, and the calls they get. The default is in `cache/learnt.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.tree import Checkpoint, Origin


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """The cost of computing tokens `[start, end)` of a prompt, in any unit; the engine counts operations.

    `per_token` is for the matrix products, `per_pair` for one query that attends to one key.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, start: int, end: int) -> float:
        pairs = (end - start) * (start + end) / 2
        return (end - start) * self.per_token + pairs * self.per_pair


class EntryFacts(NamedTuple):
    """Facts about an entry that eviction can take, or about a candidate: a state that is saved if it is worth a slot.

    In a model with states the entry is a checkpoint, otherwise a block. Times are turnovers: the bytes that the entry's
    room (the arena or a tier) has handed out, divided by its size.
    """

    origin: Origin
    cost: float  # RecomputeCost of the tokens since the nearest checkpoint above, which a hit spares
    num_bytes: int  # freed by evicting the entry: its slot and, unless it `has_children`, the `kv_bytes`
    kv_bytes: int  # keys and values since the nearest checkpoint above it
    last_used: float  # turnover at the last use
    age: float  # turnover since then
    block_hash: BlockHash  # names all tokens up to the entry's end
    uses: int = 0  # hits so far
    num_expected: int = 0  # waiting requests that would resume here
    has_children: bool = False  # later blocks of its history are cached; of a candidate: its prompt goes on
    superseded: bool = False  # the conversation has gone on from a later state
    above_origin: Origin | None = None  # the origin of the nearest checkpoint above, if there is one
    note: object = None  # the checkpoint's note; a candidate has its request's note, a block has none


class EvictionPolicy:
    """Orders entries: the entry with the smallest key is evicted first. A subclass has to write only `key`.

    In a model with states, the entries are checkpoints. Blocks that no checkpoint needs are evicted before all of them,
    and the policy is not asked. The arena and each tier have a policy object of their own.

    `key` is called when an entry is saved, used, superseded, expected by a waiting request, or left without children.
    It is called again before the entry is evicted, so a key may rise at any time. A key may fall by itself only at the
    ages that `next_change` returns.

    The other methods report events; `now` is the turnover. A policy may keep a note on each checkpoint
    (`Checkpoint.note`) and a note on each request. `resumed` and `missed` return the request's new note, and other
    methods only read it. Both notes are None at first.
    """

    clock: Callable[[], float] = time.perf_counter  # in seconds, which are simulated in the simulator

    def key(self, entry: EntryFacts) -> float:
        """Return the key of an entry as it is now, or of a candidate, which may evict entries with smaller keys."""
        raise NotImplementedError

    def next_change(self, age: float) -> float:
        """Return the next age after `age`, in arenas, at which keys fall by themselves."""
        return math.inf

    def resumed(self, checkpoint: Checkpoint, request_note: object) -> object:
        """Note that a request resumes from a checkpoint, whose `last_used` is now. Return the request's new note."""
        return request_note

    def missed(self, blocks: Sequence[BlockHash], request_note: object, now: float) -> tuple[object, BlockHash | None]:
        """Note that a request has started and computes these blocks of its prompt, because it found no state there.

        Return the request's new note. If the request continues a conversation whose end was evicted, also return the
        block of that end, otherwise None.
        """
        return request_note, None

    def saved(self, checkpoint: Checkpoint, above: Checkpoint | None, request_note: object) -> None:
        """Note that a request saved a checkpoint. `above` is the nearest checkpoint before it in its history."""

    def skipped(self, block_hash: BlockHash, request_note: object, now: float) -> None:
        """Note that the state at a prompt's end, after the block `block_hash`, was not saved for lack of room."""

    def request_ended(self, checkpoint: Checkpoint, request_note: object, *, awaits_tool: bool) -> None:
        """Note that a request that used or saved the checkpoint has ended. `awaits_tool`: it ended in a tool call."""

    def superseded(self, checkpoint: Checkpoint) -> None:
        """Note that the checkpoint's conversation has gone on from a later one."""

    def evicted(self, checkpoint: Checkpoint, above: Checkpoint | None) -> bool:
        """Note that a checkpoint is evicted. `above` is the nearest checkpoint before it in its history.

        Return whether its conversation will now continue from `above`, whose last use is then at least as late as the
        evicted checkpoint's.
        """
        return False

    def copied(self, source: Checkpoint, copy: Checkpoint) -> None:
        """Note that `copy` was made here from the checkpoint `source` of another room, or follows its changes."""
        copy.note = source.note

    def dropped(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint is removed, not evicted: nobody would use it, or its contents are wrong."""

    def reset(self) -> None:
        """Note that everything cached so far is gone."""


class LRUPolicy(EvictionPolicy):
    """Evicts the entry that was used longest ago. Entries that a waiting request would resume from go last."""

    def key(self, entry: EntryFacts) -> float:
        return math.inf if entry.num_expected else entry.last_used

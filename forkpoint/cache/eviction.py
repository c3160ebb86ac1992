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
    """The time to compute tokens `[start, end)` of a prompt, in any unit.

    `per_token` is for the matrix products, `per_pair` for one query that attends to one key.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, start: int, end: int) -> float:
        pairs = (end - start) * (start + end) / 2
        return (end - start) * self.per_token + pairs * self.per_pair


class EntryFacts(NamedTuple):
    """Facts that a policy may know of a cached entry, or of a state that might be saved.

    Times count new data, in arenas. The turnover is the bytes that the arena has handed out, divided by its size.
    """

    origin: Origin
    cost: float  # computing the tokens since the nearest checkpoint above, which a hit spares; operations in the engine
    num_bytes: int  # freed by evicting the entry: its slot and, unless it is `inside`, the `kv_bytes`
    kv_bytes: int  # keys and values since the nearest checkpoint above
    last_used: float  # turnover at the last use
    age: float  # turnover since then
    block_hash: BlockHash  # names all tokens up to the entry's end
    uses: int = 0  # hits so far
    num_expected: int = 0  # waiting requests that would resume here
    inside: bool = False  # the history goes on below it
    superseded: bool = False  # the conversation has gone on from a later state
    above_origin: Origin | None = None  # the origin of the nearest checkpoint above
    note: object = None  # the checkpoint's; of a state that might be saved, its request's; a block has none


class EvictionPolicy:
    """Orders entries: the one with the smallest key is evicted first. A subclass has to write only `key`.

    The queue calls `key` when an entry is saved, used, superseded, expected by a waiting request, or left without
    anything below it; when it comes to the front; and at the age that `next_change` returns. Between these calls the
    queued key holds. A key that has risen meanwhile is noticed at the front. A key that falls by itself must fall at
    those ages.

    The cache calls the other methods to report events; `now` is the turnover. A policy may keep a note of its own in
    `Checkpoint.note`, and one for each request: `resumed` and `missed` return the request's new note, and other methods
    only read it. Both notes are None at first.
    """

    clock: Callable[[], float] = time.perf_counter  # in seconds, which are simulated in the simulator

    def key(self, entry: EntryFacts) -> float:
        """Return the key of an entry as it is now. A state that might be saved may evict entries of smaller keys."""
        raise NotImplementedError

    def next_change(self, age: float) -> float:
        """Return the next age after `age`, in arenas, at which keys fall by themselves."""
        return math.inf

    def resumed(self, checkpoint: Checkpoint, request_note: object) -> object:
        """Note that a request resumes from a checkpoint, whose `last_used` is now. Return the request's note."""
        return request_note

    def missed(self, gone: Sequence[BlockHash], request_note: object, now: float) -> tuple[object, BlockHash | None]:
        """Note that a request computes the blocks `gone`, which may have had checkpoints.

        Returns the request's note. If the request continues a conversation whose end was evicted, also returns the
        block of that end.
        """
        return request_note, None

    def saved(self, checkpoint: Checkpoint, above: Checkpoint | None, request_note: object) -> None:
        """Note that a request saved a checkpoint; `above` is the nearest one before it."""

    def unsaved(self, block_hash: BlockHash, request_note: object, now: float) -> None:
        """Note that at time `now` there was no room for the state at a prompt's end, the block `block_hash`."""

    def left(self, checkpoint: Checkpoint, request_note: object, *, awaits_tool: bool) -> None:
        """Note that a request that used or saved a checkpoint has ended (`awaits_tool`: in a tool call)."""

    def superseded(self, checkpoint: Checkpoint) -> None:
        """Note that the checkpoint's conversation has gone on from a later one."""

    def evicted(self, checkpoint: Checkpoint, above: Checkpoint | None) -> bool:
        """Note that a checkpoint is evicted; `above` is the nearest one before it in its history, if there is one.

        Returns whether a conversation now continues from `above`, which then counts as used when the evicted one was.
        """
        return False

    def copied(self, source: Checkpoint, copy: Checkpoint) -> None:
        """Note that `copy`, in this policy's store, was made from another store's `source`, or follows its change."""
        copy.note = source.note

    def dropped(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint is removed because nobody would use it, or because its contents are wrong."""

    def reset(self) -> None:
        """Note that everything cached so far is gone."""


class LRUPolicy(EvictionPolicy):
    """Evicts the entry that was used longest ago, and those that waiting requests expect last of all."""

    def key(self, entry: EntryFacts) -> float:
        return math.inf if entry.num_expected else entry.last_used

"""What a policy knows of cached entries, and what it is told. `cache/learnt.py` has the default one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.tree import Checkpoint, Origin


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Time to compute tokens `[start, end)` of a prompt, up to a factor.

    `per_token` covers the matrix products, `per_pair` one query attending to one key.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, start: int, end: int) -> float:
        pairs = (end - start) * (start + end) / 2
        return (end - start) * self.per_token + pairs * self.per_pair


class EntryFacts(NamedTuple):
    """What a policy may know of a cached entry, or of a state that might be saved.

    `saved` is what a hit here spares: the cost (`RecomputeCost`; in the engine floating-point operations) of computing
    the tokens after the nearest checkpoint above, of kind `above`. `num_bytes` go with the entry: its slot, and if it
    is not `inside` a history that goes on below, the `kv_bytes` of keys and values since that checkpoint too. Times are
    in arenas of new data: `last_used` is a reading of the cache's clock (bytes ever handed out / bytes of the arena),
    `age` the time since. `uses` are hits so far; `num_expected` waiting requests are known to resume here. An entry is
    `superseded` if its conversation has gone on from a later state. `block_hash` names it: all tokens up to its end.
    `note` is the policy's own.
    """

    kind: Origin
    saved: float
    num_bytes: int
    kv_bytes: int
    last_used: float
    age: float
    uses: int
    num_expected: int
    inside: bool
    superseded: bool
    above: Origin | None
    block_hash: BlockHash
    note: object = None


class EvictionPolicy:
    """Orders entries: the smallest key goes first. Only `key` has to be written.

    `key` is asked when an entry is saved, used, superseded, expected by a waiting request, or left without anything
    below it, when it comes to the front of the queue, and at the age that `next_change` names. In between the filed key
    holds: one that has risen meanwhile is found out at the front; one that falls by itself must fall at those ages.

    The other methods tell what happens, and do nothing unless a policy learns. A note is the policy's own: `note` of a
    checkpoint, and that of a request, which the methods that take it return.
    """

    def key(self, entry: EntryFacts) -> float:
        """Of an entry as it is now, or of a state that might be saved: it gets room from entries of smaller keys."""
        raise NotImplementedError

    def next_change(self, age: float) -> float:
        """The age, in arenas, above `age` at which the keys of entries fall by themselves."""
        return math.inf

    def resumed(self, checkpoint: Checkpoint, request_note: object) -> object:
        """A request goes on from a checkpoint, at its `last_used`; returns the note of the request."""
        return request_note

    def missed(self, gone: Sequence[BlockHash], request_note: object, now: float) -> tuple[object, BlockHash | None]:
        """A request computes blocks `gone`, at which there may have been checkpoints. Returns the note of the request,
        and the block at which its conversation had ended, if it goes on with one that had lost its end."""
        return request_note, None

    def saved(self, checkpoint: Checkpoint, above: Checkpoint | None, request_note: object) -> None:
        """A request left a checkpoint; `above` is the nearest one before it."""

    def unsaved(self, block_hash: BlockHash, request_note: object, now: float) -> None:
        """There was no room for the state at the end of a request's prompt."""

    def left(self, checkpoint: Checkpoint, request_note: object, *, awaits_tool: bool) -> None:
        """A request that used or saved a checkpoint has ended (`awaits_tool`: in a tool call)."""

    def superseded(self, checkpoint: Checkpoint) -> None:
        """The conversation has gone on from a later checkpoint."""

    def evicted(self, checkpoint: Checkpoint, above: Checkpoint | None) -> bool:
        """A checkpoint goes for want of room; `above` is the nearest one before it. Returns whether a conversation goes
        on from that one now: it then counts as used when the one that goes was."""
        return False

    def dropped(self, checkpoint: Checkpoint) -> None:
        """A checkpoint goes because nobody would use it, or because it cannot be trusted."""

    def reset(self) -> None:
        """Everything cached so far is gone."""


class LRUPolicy(EvictionPolicy):
    """The entry used longest ago goes first."""

    def key(self, entry: EntryFacts) -> float:
        return math.inf if entry.num_expected else entry.last_used

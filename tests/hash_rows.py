"""What the hash runner keeps of a row, and what a plan asks of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from forkpoint.config import BLOCK_SIZE
from forkpoint.images import ImageSpan
from forkpoint.sched.plan import NO_SLOT, AddedRow
from tests.rolling_hash import HashArray, RollingHash


def seen_ids(ids: npt.NDArray[np.int32], images: Sequence[ImageSpan], vocab_size: int) -> npt.NDArray[np.int32]:
    """The ids that stand for what a model sees: a token of an image differs with the image and its place in it."""
    found = ids.copy()
    for image in images:
        own = crc32(image.digest) + np.arange(image.num_tokens)
        found[image.start : image.end] = own % vocab_size
    return found


@dataclass(slots=True)
class HashRow:
    added: AddedRow
    ids: list[int]
    rolls: HashArray  # [capacity]; entry n is the hash after n tokens
    blocks: npt.NDArray[np.int32]  # [capacity]
    num_blocks: int
    windows: list[list[int]]  # the table of each window
    has_sampled: bool = False
    last_start: int | None = None  # of the row's last step: a state after it may still be saved
    num_rejected: int = 0  # drafts of the row's last step with some that were not confirmed

    @property
    def seed(self) -> int:
        return 0 if self.added.params.is_greedy else self.added.seed + 1

    def blocks_of(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Return the blocks that hold tokens `[start, end)`."""
        return self.blocks[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]

    def append_token(self, token: int, hasher: RollingHash) -> None:
        count = len(self.ids)
        if count + 1 >= len(self.rolls):
            self.rolls = np.resize(self.rolls, 2 * count + 64)
        self.rolls[count + 1] = hasher.extend(int(self.rolls[count]), token)
        self.ids.append(token)
        hasher.reserve(count + 2)

    def append_blocks(self, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self.blocks):
            self.blocks = np.resize(self.blocks, 2 * end + 8)
        self.blocks[self.num_blocks : end] = block_ids
        self.num_blocks = end


@dataclass(frozen=True, slots=True)
class HashWork:
    """One row of a plan. `tokens` are the ids that it computes; those at and after `known` are drafts. It was to start
    at `latest` if all drafts of its last step counted."""

    row: int
    start: int
    latest: int
    end: int
    known: int
    read_slot: int
    write_slot: int
    tokens: list[int]
    saves: tuple[tuple[int, int], ...]  # (num_tokens, slot)
    samples: bool

    @property
    def drafts(self) -> list[int]:
        return self.tokens[self.known - self.start :]

    @property
    def written_slots(self) -> list[int]:
        """Slots that the row writes: its running one, and those of its saves."""
        return [slot for slot in (self.write_slot, *(slot for _, slot in self.saves)) if slot != NO_SLOT]

"""Counts, from the plans alone, what the vision tower encodes in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forkpoint.config import BLOCK_SIZE
from forkpoint.images import ImageSpan
from forkpoint.sched.plan import StepPlan


class Encoded(NamedTuple):
    """One run of the tower: `in_first_block` is whether the image begins in the first block of its row's chunk."""

    row: int
    num_tokens: int
    in_first_block: bool


class EncoderWatch:
    """Keeps embeddings as a runner does, and checks that each step stays within its budget and its cache."""

    def __init__(self, budget: int, cache_size: int) -> None:
        self._budget, self._cache_size = budget, cache_size
        self._kept: dict[bytes, int] = {}
        self._images: dict[int, Sequence[ImageSpan]] = {}
        self.steps: list[list[Encoded]] = []

    def note(self, plan: StepPlan) -> None:
        """Look at a plan before it is submitted. Raises AssertionError if it goes beyond a bound."""
        for digest in plan.dropped_images:
            self._kept.pop(digest, None)
        assert sum(self._kept.values()) <= self._cache_size, "more embeddings are kept than the cache holds"
        self._images |= {added.row: added.images for added in plan.added}
        encoded: list[Encoded] = []
        for row, start, count in zip(plan.rows.row, plan.rows.start, plan.rows.num_tokens, strict=True):
            encoded += self._encode(int(row), int(start), int(start + count))
        self.steps.append(encoded)
        if sum(each.num_tokens for each in encoded) > self._budget:
            assert len({each.row for each in encoded}) == 1, f"two rows exceed the budget {self._budget}: {encoded}"
            assert all(each.in_first_block for each in encoded), f"{encoded} exceeds the budget {self._budget}"

    def _encode(self, row: int, start: int, end: int) -> list[Encoded]:
        found = []
        for image in self._images[row]:
            if image.start < end and start < image.end and image.digest not in self._kept:
                self._kept[image.digest] = image.num_tokens
                first_block_end = (start // BLOCK_SIZE + 1) * BLOCK_SIZE
                found.append(Encoded(row, image.num_tokens, image.start < first_block_end))
        return found

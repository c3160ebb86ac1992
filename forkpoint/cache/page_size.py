"""Chooses the size of the arena's pages, each of which holds either blocks or slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from forkpoint.errors import ConfigError

ALIGNMENT_BYTES: Final = 64  # alignment of every tensor: a cache line, and more than any vector load needs
MAX_PADDING: Final = 0.05  # share of a page that may carry no data; less would need pages too large to move
SLOTS_WITHOUT_BYTES: Final = 64  # a page, in layouts with windows and without recurrent layers


def aligned(num_bytes: int) -> int:
    """Return the bytes, rounded up to a multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def choose_page(block_bytes: int, slot_bytes: int, kernel_blocks: int) -> tuple[int, int, int]:
    """Return (blocks per page, slots per page, page bytes). ConfigError if neither has bytes.

    A block's stride is a multiple of its kernel blocks.
    """
    if not block_bytes and not slot_bytes:
        raise ConfigError("the model keeps neither keys and values nor states; there is nothing to cache")
    if not slot_bytes:
        return 1, 0, aligned(block_bytes)
    if not block_bytes:
        return 0, 1, aligned(slot_bytes)
    best: tuple[float, int, int, int] | None = None
    for slots in range(1, 65):
        exact = slots * slot_bytes / block_bytes
        for blocks in {max(1, math.floor(exact)), max(1, math.ceil(exact))}:
            unit = ALIGNMENT_BYTES * math.lcm(slots, blocks * kernel_blocks)
            page = -(-max(slots * slot_bytes, blocks * block_bytes) // unit) * unit
            waste = 1 - min(slots * slot_bytes, blocks * block_bytes) / page
            if waste <= MAX_PADDING:
                return blocks, slots, page
            if best is None or waste < best[0]:
                best = (waste, blocks, slots, page)
    assert best is not None
    return best[1:]


def choose_shared_page(sizes: Sequence[int], kernel_blocks: int) -> tuple[list[int], int]:
    """Return how many units of each of `sizes` bytes a page holds (0 of no bytes), and the page's bytes.

    The page is the smallest one that wastes at most MAX_PADDING, whichever units it holds, or else wastes least.
    """
    largest = max(sizes)
    best: tuple[float, list[int], int] | None = None
    for count in range(1, 65):
        counts = [count * largest // size if size else 0 for size in sizes]
        unit = ALIGNMENT_BYTES * math.lcm(*(each * kernel_blocks for each in counts if each), SLOTS_WITHOUT_BYTES)
        page = -(-count * largest // unit) * unit
        waste = max(1 - each * size / page for each, size in zip(counts, sizes, strict=True) if size)
        if best is None or waste < best[0]:
            best = (waste, counts, page)
        if waste <= MAX_PADDING:
            break
    assert best is not None
    return best[1:]

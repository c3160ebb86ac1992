"""Tile sizes of kernels on each kind of device. linear/tiles.py has those of matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.ops.metadata import SegmentIndex
from forkpoint.platforms.table import traits_of


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Tile sizes and limits. The defaults are the fastest on a Hopper GPU."""

    prefill_rows: int = 128  # (query, head) pairs per attention program
    latent_rows: int = 64  # the same for latent attention
    latent_keys: int = 64  # keys per step of latent attention
    latent_heads: float = float("inf")  # heads per launch of latent attention at most
    state_values: int = 8  # value rows per program of a recurrence step
    narrow_scans: bool = False  # whether recurrence scans use narrow tiles only
    sample_block: int = 8192  # logits per step of a pass over a row
    order_pairs: int = 32  # (token, expert) pairs sorted per program
    most_expert_rows: float = float("inf")  # upper bound on the mean rows per expert that tiles are chosen by
    most_product_rows: int = 256  # rows per tile of a product at most
    most_row_width: int = 2048  # columns per step of a product of one row
    most_gated_outputs: int = 128  # outputs per tile of a gated product of FP8 weights at most
    most_gated_rows: float = float("inf")  # rows of such a product at most; above, both halves are one product


TUNED: Final = LaunchTable()
# The tiles that are live together fit in 192 KiB, which tests/ascend/test_lowering.py checks.
SMALL: Final = LaunchTable(
    prefill_rows=32,
    latent_rows=16,
    latent_keys=32,
    latent_heads=16,
    state_values=64,  # more rows per program, because a launch has at most 65,535 programs
    narrow_scans=True,
    sample_block=2048,
    order_pairs=16,
    most_expert_rows=96,
    most_product_rows=128,
    most_row_width=1024,
    most_gated_outputs=32,
    most_gated_rows=64,
)


def launch_table(device: torch.device) -> LaunchTable:
    return SMALL if traits_of(device).small_tiles else TUNED


def turns(tiles: Tensor, programs: int) -> Iterator[Tensor]:
    """Yield `tiles[N, ..]`, with `programs` programs each, in parts that respect the device's limit of programs."""
    most = traits_of(tiles.device).most_programs
    return iter((tiles,) if most is None else torch.split(tiles, max(1, most // programs)))


def segments(
    index: SegmentIndex, programs: int, scratch: Sequence[Tensor] = (), entries: int = 1
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (number of segments, `[*scratch, *index.columns]` from the first of them on) in parts.

    Each segment has `programs` programs, and a part respects the device's limit of programs. `scratch` has entries per
    chunk, as `recurrence.solve.first_chunk` counts them."""
    most, columns = traits_of(index.src.device).most_programs, index.columns
    each = max(1, len(index) if most is None else most // programs)
    yield min(each, len(index)), [*scratch, *columns]
    for first in range(each, len(index), each):
        behind = [x[first * entries :] for x in scratch]
        yield min(each, len(index) - first), [*behind, *(x[first:] for x in columns[:-2]), *columns[-2:]]

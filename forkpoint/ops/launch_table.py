"""How large the tiles of kernels are on each kind of device; those of products are in linear/tiles.py."""

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
    """The defaults are the fastest on a GPU of Hopper's kind."""

    prefill_rows: int = 128  # (query, head) pairs of a program of attention
    latent_rows: int = 64  # and over latents,
    latent_keys: int = 64  # which takes so many keys at a time,
    latent_heads: float = float("inf")  # and heads in one launch
    state_values: int = 8  # value rows of a state, of a program that takes one token or a few
    narrow_scans: bool = False  # whether states go through a prompt in the narrow tiles alone
    sample_block: int = 8192  # logits that a pass over a row reads at once
    order_pairs: int = 32  # (token, expert) pairs that are put in order together
    most_expert_rows: float = float("inf")  # that experts serve on the mean, as far as their tiles look at it
    most_product_rows: int = 256  # of a tile of a product
    most_row_width: int = 2048  # columns that the product of one row takes at a time
    most_gated_outputs: int = 128  # of a tile of a gated product with weights in FP8
    most_gated_rows: float = float("inf")  # of such a product; beyond, its halves are one product


TUNED: Final = LaunchTable()
# Tiles that live at the same time fit in 192 KiB: tests/ascend/test_lowering.py adds them up.
SMALL: Final = LaunchTable(
    prefill_rows=32,
    latent_rows=16,
    latent_keys=32,
    latent_heads=16,
    state_values=64,  # few programs: a launch has at most 65,535
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
    """`tiles[N, ..]` with `programs` for each in as many parts, one launch after another, as the device wants."""
    most = traits_of(tiles.device).most_programs
    return iter((tiles,) if most is None else torch.split(tiles, max(1, most // programs)))


def segments(
    index: SegmentIndex, programs: int, scratch: Sequence[Tensor] = (), entries: int = 1
) -> Iterator[tuple[int, list[Tensor]]]:
    """(number, `[*scratch, *index.columns]` from the first of them on) of segments with `programs` each, in as many
    parts as the device wants. `scratch` has so many entries for each chunk, as `recurrence.solve.first_chunk` counts
    them."""
    most, columns = traits_of(index.src.device).most_programs, index.columns
    each = max(1, len(index) if most is None else most // programs)
    yield min(each, len(index)), [*scratch, *columns]
    for first in range(each, len(index), each):
        behind = [x[first * entries :] for x in scratch]
        yield min(each, len(index) - first), [*behind, *(x[first:] for x in columns[:-2]), *columns[-2:]]

"""Builds the index tensors of a step from host lists. The package itself builds them from arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forkpoint.ops.metadata import (
    AttentionIndex,
    AttentionWork,
    IntArray,
    KeySplits,
    SegmentIndex,
    running_total,
    tile_table,
)

SPLITS = KeySplits()


def segment_index(
    lens: Sequence[int],
    src: Sequence[int],
    dst: Sequence[int],
    saves: Sequence[Sequence[tuple[int, int]]] = (),
    device: torch.device | None = None,
) -> SegmentIndex:
    """Build the index of segments. `saves[n]` are the (position, slot) pairs of segment `n`. Host copies are
    included."""
    saves = saves or [()] * len(lens)
    pairs = np.asarray([pair for own in saves for pair in own], np.int32).reshape(-1, 2)

    def there(values: Sequence[int] | IntArray) -> Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(device=device)

    return SegmentIndex(
        cu_seqlens=there(running_total(lens)),
        src=there(src),
        dst=there(dst),
        save_ptr=there(running_total([len(own) for own in saves])),
        save_pos=there(pairs[:, 0]),
        save_dst=there(pairs[:, 1]),
        lens=tuple(lens),
        tiles=there(tile_table(np.asarray(lens, np.int32))),
    )


def attention_index(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_table: Tensor,
    key_places: Tensor,
    num_decodes: int = 0,
    table_rows: Sequence[int] | None = None,
    splits: KeySplits | None = SPLITS,
    first_key: int = 0,
) -> AttentionIndex:
    """Build the index of attention on the block table's device. By default row `r` uses line `r` of the table. Without
    `splits` the index serves operators on the host."""
    device = block_table.device
    queries, keys = np.asarray(query_lens, np.int32), np.asarray(kv_lens, np.int32)
    lines = np.arange(len(keys)) if table_rows is None else np.asarray(table_rows)
    work = None
    if splits is not None:
        arrays = [tile_table(queries[num_decodes:], num_decodes), *splits.table(keys[:num_decodes])]
        tiles, parts, pointers = (torch.from_numpy(array).to(device) for array in arrays)
        work = AttentionWork(tiles, parts, pointers)
    return AttentionIndex(
        num_decodes,
        torch.from_numpy(running_total(queries)).to(device),
        torch.from_numpy(keys).to(device),
        block_table,
        torch.from_numpy(lines.astype(np.int32)).to(device),
        key_places,
        tuple(queries.tolist()),
        tuple(keys.tolist()),
        work,
        first_key,
    )

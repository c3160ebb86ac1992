"""The block table: where the keys and values of each row's tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.errors import BlockTableError
from forkpoint.ops.deal import ALL, Deal
from forkpoint.platforms.platform import Platform
from forkpoint.sched.plan import IntArray, Move, MoveKind, MoveRoute

LongArray: TypeAlias = npt.NDArray[np.int64]

NO_PLACE: Final = -1  # keys that are stored nowhere here


class BlockTable:
    """Rows of kernel block ids, on the host and, as of the last `commit`, on the device.

    Rows get block ids. Kernels see block `b` as blocks `b * ratio` to `(b + 1) * ratio` of `kernel_block_size` tokens.
    If tokens are dealt to ranks, a block id stands for `block_size` tokens on each rank. A row holds
    `max_blocks_per_row` ids.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks_per_row: int,
        block_size: int,
        platform: Platform,
        kernel_block_size: int = 0,
        deal: Deal = ALL,
    ) -> None:
        """`kernel_block_size` divides `block_size`; 0 means that they are equal.

        Raises ConfigError if the deal's interleave does not divide `block_size`.
        """
        deal.check(block_size)
        self.num_rows, self.block_size, self.deal = num_rows, block_size, deal
        self.kernel_block_size = kernel_block_size or block_size
        self.ratio = block_size // self.kernel_block_size
        self.max_entries_per_row = max_blocks_per_row * self.ratio
        # `[num_rows, max_entries_per_row]` kernel block ids; entries past a row's blocks are 0.
        self.host: IntArray = np.zeros((num_rows, self.max_entries_per_row), np.int32)
        self._num_entries = np.zeros(num_rows, np.int32)
        self._platform = platform
        self.device = self._platform.upload(self.host)  # the same int32, as of `commit`
        self._changed: list[LongArray] = []  # flat indices of entries that the device does not have yet

    def num_blocks(self, row: int) -> int:
        return int(self._num_entries[row]) // self.ratio

    def append(self, rows: IntArray, pointers: IntArray, block_ids: IntArray) -> None:
        """Append blocks `[pointers[i], pointers[i + 1])` of `block_ids` to row `rows[i]`; the rows are distinct.

        The device gets them with `commit`. Raises BlockTableError, and changes nothing, if blocks do not fit or there
        is no such row.
        """
        if not len(block_ids):
            return
        if not (int(rows.min()) >= 0 and int(rows.max()) < self.num_rows):
            raise BlockTableError(f"a row of {rows.tolist()} is not in a block table of {self.num_rows} rows")
        entries = block_ids
        if self.ratio > 1:
            entries = np.add.outer(block_ids * np.int32(self.ratio), np.arange(self.ratio, dtype=np.int32)).ravel()
            pointers = pointers * self.ratio
        counts, starts = pointers[1:] - pointers[:-1], self._num_entries[rows]
        ends = starts + counts
        if int(ends.max()) > self.max_entries_per_row:
            i = int(ends.argmax())
            raise BlockTableError(
                f"row {int(rows[i])} has {int(starts[i]) // self.ratio} blocks and was given "
                f"{int(counts[i]) // self.ratio} more; a row holds {self.max_entries_per_row // self.ratio}; raise "
                "max_model_len"
            )
        first = rows.astype(np.int64) * self.max_entries_per_row + starts
        places = np.repeat(first - pointers[:-1], counts) + np.arange(len(entries))
        self.host.reshape(-1)[places] = entries
        self._num_entries[rows] = ends
        self._changed.append(places)

    def add(self, row: int, block_ids: IntArray) -> None:
        """Set a row's blocks to exactly `block_ids`. Raises what `append` raises."""
        self.clear_row(row)
        self.append(np.full(1, row, np.int32), np.asarray([0, len(block_ids)], np.int32), block_ids)

    def clear_row(self, row: int) -> None:
        self.host[row] = 0
        self._num_entries[row] = 0

    def remap(self, moves: Sequence[Move], group: int = 0) -> None:
        """Follow compaction: replace the ids of blocks of this group that `moves` moved in the arena, in all rows.

        A block that was moved away may be reused and moved again within `moves`. No row has its new contents.
        """
        contents: dict[int, int | None] = {}  # block -> the block whose contents it has now; None: new contents
        for move in moves:
            if move.kind is MoveKind.BLOCK and move.group == group and move.route is MoveRoute.ARENA:
                contents[move.dst] = contents.get(move.src, move.src)
                contents[move.src] = None
        origins = {place: origin for place, origin in contents.items() if origin is not None}
        if not origins:
            return
        used = np.arange(self.max_entries_per_row) < self._num_entries[:, None]
        block_ids, within = np.divmod(self.host[used], np.int32(self.ratio))
        places = np.arange(max(int(block_ids.max(initial=0)), *origins.values()) + 1, dtype=np.int32)
        places[list(origins.values())] = list(origins)
        self.host[used] = places[block_ids] * self.ratio + within
        self._changed.append(np.flatnonzero(used))

    def key_places(self, rows: IntArray, positions: LongArray) -> LongArray:
        """Return the place of the keys of token `positions[t]` of row `rows[t]`, `[T]` int64, in tokens from block 0.

        NO_PLACE stands for a token that another rank keeps. Raises BlockTableError for a position past the row's
        blocks.
        """
        kept = positions if self.deal.num_ranks == 1 else self.deal.places(positions)
        entries, within = np.divmod(kept, self.kernel_block_size)
        beyond = entries >= self._num_entries[rows]
        if beyond.any():
            bad = int(np.argmax(beyond))
            raise BlockTableError(
                f"token {int(positions[bad])} of row {int(rows[bad])} lies past its {self.num_blocks(int(rows[bad]))} "
                f"blocks of {self.block_size * self.deal.num_ranks} tokens"
            )
        found: LongArray = self.host[rows, entries].astype(np.int64) * self.kernel_block_size + within
        return found if self.deal.num_ranks == 1 else np.where(self.deal.owns(positions), found, NO_PLACE)

    def device_key_places(self, lines: Tensor, positions: Tensor) -> Tensor:
        """Return what `key_places` does, as of the last `commit`, for tensors on the device, of any shape.

        Line NO_ROW stands for padding, which has NO_PLACE.
        """
        kept, size = self.deal.places(positions), self.kernel_block_size
        blocks = self.device[lines.clamp(min=0), kept // size].long()
        return torch.where((lines >= 0) & self.deal.owns(positions), blocks * size + kept % size, NO_PLACE)

    def commit(self) -> None:
        """Copy all changes since the last call to the device, where entries past a row's blocks may be old."""
        if self._changed and not self._platform.shares_memory:
            places = np.concatenate(self._changed)
            pair = self._platform.upload(np.array([places, self.host.reshape(-1)[places]]))  # int64, like places
            self.device.view(-1).index_copy_(0, pair[0], pair[1].int())
        self._changed.clear()

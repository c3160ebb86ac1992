"""The rows of the batch, as the runner sees them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.ops.deal import ALL, Deal
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.row_images import RowImages
from forkpoint.runtime.row_sampling import RowSampling, TokenCounts
from forkpoint.sched.plan import AddedRow, IntArray, ReplacedPrefix, StepPlan


class Batch:
    """The rows of the running batch: token ids, block tables, last sampled id, how each row samples.

    `tables` has a table for each of `layout.groups`, and one without blocks if there are none; `table` is the first.
    `last_sampled` `[num_rows + 1]` int64 is on the device. Padded rows sample into its last entry.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_rows: int,
        max_model_len: int,
        vocab_size: int,
        platform: Platform,
        images: RowImages | None = None,
        deal: Deal = ALL,
    ) -> None:
        """`deal` says which tokens this rank keeps in blocks without a window."""
        blocks = layout.num_blocks_for(max_model_len) or 1
        self.tables: list[BlockTable] = []
        for group in layout.groups or [None]:
            own, size = ALL if group and group.window else deal, group.kernel_block_size if group else 0
            self.tables.append(BlockTable(num_rows, blocks, BLOCK_SIZE // own.num_ranks, platform, size, own))
        self.table = self.tables[0]
        self.last_sampled = torch.zeros(num_rows + 1, dtype=torch.int64, device=platform.device)
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.rows: dict[int, AddedRow] = {}  # by number
        self.images = images
        self._sampling: dict[int, RowSampling] = {}
        self._counts = TokenCounts(num_rows, vocab_size, platform)

    def sampling(self, rows: IntArray) -> list[RowSampling]:
        return [self._sampling[row] for row in rows.tolist()]

    def update(self, plan: StepPlan) -> None:
        """Remove, remap, add and replace rows, then give rows their new blocks, on the device too.

        KeyError if a removed row is not there. Call `prepare` for added rows before they sample.
        """
        for row in plan.removed:
            del self.rows[row]
            if self.images is not None:
                self.images.remove(row)
            self._sampling.pop(row, None)
            for table in self.tables:
                table.clear_row(row)
        if plan.moves:
            for group, table in enumerate(self.tables):
                table.remap(plan.moves, group)
        for added in plan.added:
            self.rows[added.row] = added
            if self.images is not None:
                self.images.add(added)
            self.num_prompt_tokens[added.row] = added.num_prompt_tokens
            self._set_blocks(added)
        for replaced in plan.replaced:
            self._set_blocks(replaced)
        if len(plan.rows.new_blocks):
            for table, ids in zip(self.tables, (plan.rows.new_blocks, *plan.rows.more_blocks), strict=True):
                table.append(plan.rows.row, plan.rows.block_ptr, ids)
        if len(plan.rows.new_blocks) or plan.added or plan.replaced or plan.moves:
            for table in self.tables:
                table.commit()

    def _set_blocks(self, row: AddedRow | ReplacedPrefix) -> None:
        for table, ids in zip(self.tables, (row.block_ids, *row.more_block_ids), strict=True):
            table.add(row.row, ids)

    def prepare(self, added: Iterable[AddedRow]) -> None:
        """Prepare how added rows sample, before their first step.

        A request's parameters may make this raise. Then the rows have to be removed.
        """
        for row in added:
            self._sampling[row.row] = RowSampling.create(row, self._counts)

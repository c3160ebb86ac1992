"""The rows of the batch, as the runner sees them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.row_images import RowImages
from forkpoint.runtime.row_sampling import RowSampling, TokenCounts
from forkpoint.sched.plan import AddedRow, IntArray, StepPlan


class Batch:
    """The rows of the running batch: token ids, block table, last sampled id, how each row samples.

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
    ) -> None:
        blocks = layout.num_blocks_for(max_model_len) if layout.has_kv else 1
        self.table = BlockTable(num_rows, blocks, BLOCK_SIZE, platform, layout.kernel_block_size)
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

        Call `prepare` for added rows before they sample.
        """
        for row in plan.removed:
            del self.rows[row]
            if self.images is not None:
                self.images.remove(row)
            self._sampling.pop(row, None)
            self.table.clear_row(row)
        if plan.moves:
            self.table.remap(plan.moves)
        for added in plan.added:
            self.rows[added.row] = added
            if self.images is not None:
                self.images.add(added)
            self.num_prompt_tokens[added.row] = added.num_prompt_tokens
            self.table.add(added.row, added.block_ids)
        for replaced in plan.replaced:
            self.table.add(replaced.row, replaced.block_ids)
        if len(plan.rows.new_blocks):
            self.table.append(plan.rows.row, plan.rows.block_ptr, plan.rows.new_blocks)
        if len(plan.rows.new_blocks) or plan.added or plan.replaced or plan.moves:
            self.table.commit()

    def prepare(self, added: Iterable[AddedRow]) -> None:
        """Prepare the sampling of added rows, before their first step.

        A request's parameters may make this raise. Then the rows have to be removed.
        """
        for row in added:
            self._sampling[row.row] = RowSampling.create(row, self._counts)

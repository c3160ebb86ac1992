"""Drafts by the model's MTP layer, made at the start of the step that verifies them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Model
from forkpoint.models.mtp import FIRST_KEY
from forkpoint.ops.metadata import AttentionIndex, KeySplits
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.records import TokenRecords
from forkpoint.runtime.step_inputs import rows_to_draft
from forkpoint.sched.plan import IntArray, StepPlan


class ModelDrafts:
    """Fills in the drafts that a plan leaves to the runner. The layer's keys of the drafts go where the step's own will
    be written: the row has these blocks already, and what is wrong there is overwritten."""

    def __init__(self, model: Model, batch: Batch, records: TokenRecords, platform: Platform) -> None:
        self._model, self._batch, self._records, self._platform = model, batch, records, platform
        self._layer = len(model.config.layers)
        self._splits = None if platform.shares_memory else KeySplits(batch.table.kernel_block_size)

    def filled(self, plan: StepPlan, must_know: bool) -> StepPlan:
        """The plan with ids for all drafts."""
        rows = plan.rows
        chosen, firsts = rows_to_draft(rows)
        if not len(chosen):
            return plan
        # Those with most drafts first, so that the rows of each further draft are the first of those before.
        chosen = chosen[np.argsort(-rows.num_drafts[chosen], kind="stable")]
        first, counts, row, start = firsts[chosen], rows.num_drafts[chosen], rows.row[chosen], rows.start[chosen]
        known = self._platform.upload(rows.tokens[first].astype(np.int64))
        last = self._batch.last_sampled[self._platform.upload(row.astype(np.int64))]
        ids = torch.where(known < 0, last, known)
        hidden = self._records.newest(self._layer, "conv", row, rows.read_slot[chosen])
        drafted, places = list[Tensor](), list[IntArray]()
        for i in range(int(counts[0])):
            count = int((counts > i).sum())
            ids, hidden = self._next(ids[:count], hidden[:count], row[:count], start[:count] + i)
            drafted.append(ids)
            places.append(first[:count] + 1 + i)
        tokens = rows.tokens.copy()
        tokens[np.concatenate(places)] = torch.cat(drafted).cpu().numpy()
        return replace(plan, rows=replace(rows, tokens=tokens))

    def _next(self, ids: Tensor, hidden: Tensor, row: IntArray, position: IntArray) -> tuple[Tensor, Tensor]:
        """The likeliest ids behind `ids`, which stand at these positions, and what says so."""
        table, count = self._batch.table, len(row)
        places = table.kv_slots(row, position.astype(np.int64))
        index = AttentionIndex.create(
            [1] * count,
            (position + 1).tolist(),
            table.device,
            self._platform.upload(places),
            count,
            row.tolist(),
            self._splits,
            FIRST_KEY,
        )
        at = self._platform.upload(position.astype(np.int64) - 1)
        hidden = self._model.draft(ids, hidden, ForwardContext(at, count, index, {}, {}, self._records.layers))
        return self._model.head.guess(hidden), hidden

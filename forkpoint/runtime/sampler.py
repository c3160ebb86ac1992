"""Sampling: from logits to token ids. A row does not depend on other rows, and nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.ops.metadata import running_total
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns
from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.draft_spans import DraftSpans
from forkpoint.runtime.logprobs import Scores, score
from forkpoint.runtime.row_sampling import RowSampling
from forkpoint.sched.plan import IntArray, TokenMasks


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled ids of all rows of the logits.

    `token_ids[i]` is meaningless unless `finite[i]`. `logprobs` are for rows that asked, by their index. In a step with
    drafts the rows are all sampled positions, accepted or not.
    """

    token_ids: Tensor  # [N] int64
    finite: Tensor  # [N] bool
    logprobs: Scores | None = None


@dataclass(frozen=True, slots=True)
class OptimisticRows:
    """Optimistic rows, whose number of outputs the host does not know.

    Row `i` has up to `most_rejected[i]` outputs fewer than planned. The device has the exact number, `num_rejected[i]`.
    """

    most_rejected: IntArray  # [N]
    num_rejected: Tensor  # [N] int64


class UniformSource:
    """One number in [0, 1) for each (seed, output position).

    Philox computes it with the seed as key and the position as counter, so it depends neither on the batch nor on
    preemption.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state

    def draw(self, seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
        raw = np.empty(len(seeds), np.uint64)
        key, counter = self._state["state"]["key"], self._state["state"]["counter"]
        for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            key[0], counter[0] = seed, position
            self._philox.state = self._state
            raw[i] = self._philox.random_raw()
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sampler:
    """Samples rows of logits.

    Applies, in vLLM's order: logit_bias, min_tokens, penalties, the ids that a grammar allows, temperature, min_p,
    top_k, top_p. Log-probabilities are those of the model's own logits.
    """

    def __init__(self, ops: OpTable, platform: Platform) -> None:
        self._ops, self._platform, self._uniform = ops, platform, UniformSource()

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[RowSampling],
        positions: IntArray,
        masks: TokenMasks | None = None,
        spans: DraftSpans | None = None,
        optimistic: OptimisticRows | None = None,
    ) -> Sampled:
        """Sample an id for each row of `logits[N, V]`, of any float type.

        `positions[i]` is how many outputs row `i` has already. Optimistic rows may have fewer, and are past
        `min_tokens`. `masks` name rows by their index. With `spans` each row of the logits is one position, and
        `rows` and `positions` have one element for each. Without spans the sampled ids are counted for penalties.
        With them the caller calls `count` for the accepted ones.
        """
        adjusted = self._adjust(logits, rows, positions, masks, spans)
        if any(row.temperature > 0 for row in rows):
            token_ids, finite = self._ops.sample_rows(adjusted, self._columns(rows, positions, optimistic))
        else:
            token_ids, finite = self._ops.greedy(adjusted)
        if adjusted is not logits:  # a mask may hide logits that are not finite
            finite = finite & self._ops.greedy(logits)[1]
        if spans is None:
            self.count(rows, token_ids)
        return Sampled(token_ids, finite, self._score(logits, rows, token_ids))

    def count(self, rows: Sequence[RowSampling], token_ids: Tensor, kept: Callable[[], Tensor] | None = None) -> None:
        """Count sampled ids `[N]` for the penalties of rows that have some, on the device.

        With spans, `kept` returns which positions count `[N]`.
        """
        counted = [(i, row.line, row.counts) for i, row in enumerate(rows) if row.counts is not None]
        if counted:
            index, lines = self._platform.upload(np.asarray([[i, line] for i, line, _ in counted], np.int64).T.copy())
            often = None if kept is None else kept().index_select(0, index)
            counted[0][2].record(lines, token_ids.index_select(0, index), often)

    def _adjust(
        self,
        logits: Tensor,
        rows: Sequence[RowSampling],
        positions: IntArray,
        masks: TokenMasks | None,
        spans: DraftSpans | None,
    ) -> Tensor:
        """Return the logits after bias, min_tokens, penalties and masks.

        Returns an fp32 copy, or the logits themselves if nothing applies.
        """
        biased = [(i, row.bias) for i, row in enumerate(rows) if row.bias is not None]
        stopped = [
            (i, row.stop_ids)
            for i, row in enumerate(rows)
            if row.stop_ids is not None and positions[i] < row.params.min_tokens
        ]
        penalised = [i for i, row in enumerate(rows) if row.counts is not None]
        if not biased and not stopped and not penalised and masks is None:
            return logits
        adjusted, upload = logits.to(torch.float32, copy=True), self._platform.upload
        flat, vocab = adjusted.view(-1), logits.shape[1]
        if biased:
            places = upload(np.concatenate([i * vocab + ids for i, (ids, _) in biased]))
            flat.index_add_(0, places, upload(np.concatenate([values for _, (_, values) in biased])))
        if stopped:
            flat.index_fill_(0, upload(np.concatenate([i * vocab + ids for i, ids in stopped])), -torch.inf)
        if penalised:
            counts = rows[penalised[0]].counts
            assert counts is not None
            lines = [rows[i].line for i in penalised]
            table = counts.table
            if spans is not None:  # a position also counts the drafts before it
                table = counts.with_drafts(lines, *upload(spans.drafts_before(penalised)))
                lines = list(range(len(lines)))
            self._ops.apply_penalties(adjusted, table, self._penalties(rows, penalised, lines))
        if masks is not None:
            self._ops.apply_bitmasks(adjusted, upload(masks.rows.astype(np.int64)), upload(masks.bits))
        return adjusted

    def _penalties(self, rows: Sequence[RowSampling], penalised: list[int], lines: list[int]) -> PenaltyColumns:
        params = [rows[i].params for i in penalised]
        where = np.asarray([penalised, lines], np.int64)
        factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        upload = self._platform.upload
        return PenaltyColumns(*upload(where), *upload(np.asarray(factors, np.float32).T.copy()))

    def _columns(
        self, rows: Sequence[RowSampling], positions: IntArray, optimistic: OptimisticRows | None
    ) -> SamplingColumns:
        params = [row.params for row in rows]
        reals = np.asarray(
            [
                [row.temperature for row in rows],
                [p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
                [p.top_p for p in params],
            ],
            np.float32,
        )
        uniform, upload = self._uniforms([row.seed for row in rows], positions, optimistic), self._platform.upload
        temperature, reach, top_p = upload(reals)
        top_k = upload(np.asarray([max(p.top_k, 0) for p in params], np.int32))
        return SamplingColumns(temperature, reach, top_k, top_p, uniform)

    def _uniforms(self, seeds: Sequence[int], positions: IntArray, optimistic: OptimisticRows | None) -> Tensor:
        upload = self._platform.upload
        if optimistic is None:
            return upload(self._uniform.draw(seeds, positions.tolist()))
        counts = 1 + optimistic.most_rejected  # one for each possible number of outputs; the device picks
        first = running_total(counts)
        seen = np.repeat(positions + first[:-1], counts) - np.arange(first[-1])
        drawn = upload(self._uniform.draw(np.repeat(seeds, counts).tolist(), seen.tolist()))
        return drawn[upload(first[:-1].astype(np.int64)) + optimistic.num_rejected]

    def _score(self, logits: Tensor, rows: Sequence[RowSampling], token_ids: Tensor) -> Scores | None:
        asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        if not asked:
            return None
        if len(asked) < len(rows):
            index = self._platform.upload(np.asarray(list(asked), np.int64))
            logits, token_ids = logits.index_select(0, index), token_ids.index_select(0, index)
        return score(logits, token_ids, asked, self._ops, self._platform)

"""Steps in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from forkpoint.ops.rows.columns import NOT_FINITE
from forkpoint.platforms.platform import DeviceEvent
from forkpoint.runtime.draft_spans import DraftSpans
from forkpoint.runtime.logprobs import Scores
from forkpoint.sched.plan import FetchReport, IntArray, StepResult, TierReport, TokenLogprobs

NextReports: TypeAlias = Callable[[], tuple[TierReport | None, FetchReport | None]]


class Verified(NamedTuple):
    """A step's drafts: the spans, and how many positions of each row count."""

    spans: DraftSpans
    counts: Tensor


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that the device works on. `result` waits for it.

    `partial` is the part of its result that the host has already. `answers[i]` is the id sampled for `rows[i]`, or
    NOT_FINITE. In a step with drafts it has the ids of all positions, row after row. `next_reports` is given if copies
    may end later than their plan.
    """

    partial: StepResult
    done: DeviceEvent
    rows: IntArray
    answers: Tensor | None = None
    verified: Verified | None = None
    logprobs: Scores | None = None
    prompts: Sequence[tuple[int, Sequence[Scores]]] = ()  # rows, with the scores of their prompts' tiles
    next_reports: NextReports | None = None

    def result(self) -> StepResult:
        self.done.synchronize()
        result = self.partial
        if self.prompts:
            prompts = {
                row: tuple(each for tile in tiles for each in tile.fetch().items()) for row, tiles in self.prompts
            }
            result = replace(result, prompt_logprobs=prompts)
        if self.next_reports is not None:
            tier_report, fetch_report = self.next_reports()
            result = replace(result, tier_report=tier_report, fetch_report=fetch_report)
        if self.answers is None:
            return result
        token_ids, rows, counts, kept = self.answers.numpy().astype(np.int32), self.rows, None, None
        if self.verified is not None:
            counts = self.verified.counts.numpy().astype(np.int32)
            kept = self.verified.spans.kept(counts)
            token_ids, rows = token_ids[kept], np.repeat(rows, counts)
        logprobs = dict[int, tuple[TokenLogprobs, ...]]()
        if self.logprobs is not None:
            scores, positions = self.logprobs.fetch(), range(len(rows)) if kept is None else kept.tolist()
            for row, position in zip(rows.tolist(), positions, strict=True):
                if position in scores:
                    logprobs[row] = (*logprobs.get(row, ()), scores[position])
        failed = tuple(rows[token_ids == NOT_FINITE].tolist())
        return replace(result, token_ids=token_ids, counts=counts, failed_rows=failed, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that raised, or that was not run because the failure of a step before it had not been seen yet.

    `result` calls `seen` and raises the error.
    """

    error: Exception
    seen: Callable[[], None]

    def result(self) -> StepResult:
        self.seen()
        raise self.error

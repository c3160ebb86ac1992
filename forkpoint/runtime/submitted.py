"""Steps that were submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from forkpoint.ops.rows.columns import NOT_FINITE
from forkpoint.platforms.platform import Mark
from forkpoint.runtime.logprobs import Scores
from forkpoint.runtime.windows import Windows
from forkpoint.sched.plan import IntArray, StepResult, TokenLogprobs


class Verified(NamedTuple):
    """Of a step with drafts: its positions, how many of each row count, and who is to be told that."""

    windows: Windows
    counts: Tensor
    apply_counts: Callable[[IntArray], None]


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that the device works on; `partial` is its result as far as the host has it. `answers[i]` was sampled for
    `rows[i]`, NOT_FINITE where logits were not. Of a step with drafts they are those of all positions."""

    partial: StepResult
    done: Mark
    rows: IntArray
    answers: Tensor | None = None
    verified: Verified | None = None
    logprobs: Scores | None = None
    prompts: Sequence[tuple[int, Sequence[Scores]]] = ()  # rows, with those of their prompts in tiles

    def result(self) -> StepResult:
        self.done.synchronize()
        prompts = {row: tuple(each for tile in tiles for each in tile.fetch().items()) for row, tiles in self.prompts}
        result = replace(self.partial, prompt_logprobs=prompts)
        if self.answers is None:
            return result
        token_ids, rows, counts, kept = self.answers.numpy().astype(np.int32), self.rows, None, None
        if self.verified is not None:
            counts = self.verified.counts.numpy().astype(np.int32)
            self.verified.apply_counts(counts)
            kept = self.verified.windows.kept(counts)
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
    """A step that raised, or that followed one whose failure had not been seen; `seen` is told when it is."""

    error: Exception
    seen: Callable[[], None]

    def result(self) -> StepResult:
        self.seen()
        raise self.error

"""Steps that were submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from forkpoint.platforms.platform import Mark
from forkpoint.runtime.logprobs import RowScores, Scores
from forkpoint.sched.plan import IntArray, StepResult, TokenLogprobs

NOT_FINITE = -1  # in place of a token id: the logits were not


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a row's prompt tokens, in tiles of (first position, entries)."""

    row: int
    tiles: tuple[tuple[int, Scores], ...]

    def fetch(self) -> tuple[tuple[int, TokenLogprobs], ...]:
        found = [(first, tile.fetch()) for first, tile in self.tiles]
        return tuple((first + i, entry) for first, entries in found for i, entry in enumerate(entries))


class Accepted(NamedTuple):
    """Of a step with drafts: the ids that count, `counts[r]` for each row, and their scores, ready to be fetched."""

    token_ids: IntArray
    counts: IntArray
    logprobs: RowScores | None


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that the device works on. `answers[i]` was sampled for `rows[i]`, NOT_FINITE where logits were not. Of a
    step with drafts they are those of all positions, and `accept` tells which of them count."""

    step: int
    done: Mark | None = None
    rows: IntArray | None = None
    answers: Tensor | None = None
    accept: Callable[[IntArray], Accepted] | None = None
    logprobs: RowScores | None = None
    prompts: tuple[PromptScores, ...] = ()
    num_tokens: int = 0
    slot_bytes_copied: int = 0
    moved_bytes: int = 0
    replayed: bool = False

    def result(self) -> StepResult:
        assert self.done is not None
        self.done.synchronize()
        token_ids, failed, logprobs = np.empty(0, np.int32), (), dict[int, tuple[TokenLogprobs, ...]]()
        counts, scores, rows = None, self.logprobs, self.rows
        if rows is not None and self.answers is not None:
            token_ids = self.answers.numpy().astype(np.int32)
            if self.accept is not None:
                token_ids, counts, scores = self.accept(token_ids)
                rows = np.repeat(rows, counts)
            failed = tuple(rows[token_ids == NOT_FINITE].tolist())
            for i, entry in (scores.fetch() if scores is not None else {}).items():
                row = int(rows[i])
                logprobs[row] = (*logprobs.get(row, ()), entry)
        return StepResult(
            self.step,
            token_ids,
            counts,
            failed,
            logprobs,
            {scores.row: scores.fetch() for scores in self.prompts},
            self.num_tokens,
            self.slot_bytes_copied,
            self.moved_bytes,
            self.replayed,
        )


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that raised, or that followed one whose failure had not been seen; `seen` is told when it is."""

    error: Exception
    seen: Callable[[], None]

    def result(self) -> StepResult:
        self.seen()
        raise self.error

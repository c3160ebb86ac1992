"""A runner of one rank or several that notes what goes in and out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkpoint.runtime.runner import ModelRunner, StepOutputs
from forkpoint.runtime.step_inputs import sampled_tokens
from forkpoint.sched.plan import StepPlan, StepResult, SubmittedStep
from forkpoint.worker.disk_ranks import TierTickets


@dataclass(frozen=True)
class RanksStep:
    """A step that several ranks have run."""

    first: SubmittedStep
    others: Sequence[SubmittedStep]
    tickets: TierTickets

    def result(self) -> StepResult:
        found, *others = [step.result() for step in (self.first, *self.others)]
        for other in others:
            assert other.token_ids.tolist() == found.token_ids.tolist(), "ranks sampled other tokens"
        reports = [each.tier_report for each in (found, *others) if each.tier_report is not None]
        return replace(found, tier_report=self.tickets.merge(reports))


@dataclass
class Probe:
    """A ModelRunner, with those of further ranks, that notes what goes in and out.

    `logits[id, i]` are those from which output `i` of sequence `id` was sampled; `entered` counts the tokens of
    each sequence that the model computed. `before_step` and `after_step` are hooks for faults. The logits of sequence
    `failing` are not finite once it has been in `failing_after` steps.
    """

    inner: ModelRunner
    others: Sequence[ModelRunner] = ()
    threads: Executor | None = None  # of the others
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    entered: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    rows: dict[int, str] = field(default_factory=dict)
    before_step: Callable[[StepPlan], None] = lambda plan: None
    after_step: Callable[[StepPlan], None] = lambda plan: None
    plan: StepPlan | None = None
    failing: str = ""
    failing_after: int = 0

    def __post_init__(self) -> None:
        self._tickets = TierTickets(1 + len(self.others))
        watch_logits(self.inner, self._note)
        for other in self.others:  # which have a part of them
            watch_logits(other, lambda row, num_outputs, logits: None)
        for runner in (self.inner, *self.others):
            self._break_hidden(runner)

    def _break_hidden(self, runner: ModelRunner) -> None:
        """Have the runner's model answer NaN where the sequence that is to fail samples."""
        forward = runner._forward

        def broken(*given: Any) -> Tensor:
            hidden, plan = forward(*given), self.plan
            if self.failing and not self.failing_after and plan is not None:
                rows = np.repeat(plan.sampled_rows, 1 + plan.rows.num_drafts[plan.rows.samples])
                fails = [self.rows[row] == self.failing for row in rows.tolist()]
                hidden[sampled_tokens(plan.rows)[fails]] = torch.nan
            return hidden

        runner._forward = broken  # type: ignore[method-assign]

    def _note(self, row: int, num_outputs: int, logits: Tensor) -> None:
        self.logits[self.rows[row], num_outputs] = logits.float().clone()

    def submit(self, plan: StepPlan) -> SubmittedStep:
        self.plan = plan
        for added in plan.added:
            self.rows[added.row] = added.request_id
        for row, count in zip(plan.rows.row.tolist(), plan.rows.num_tokens.tolist(), strict=True):
            self.entered[self.rows[row]] += count
            self.failing_after -= self.failing_after > 0 and self.rows[row] == self.failing
        self.replaced += len(plan.replaced)
        self.before_step(plan)
        pending = self._submit(plan)
        self.after_step(plan)
        return pending

    def _submit(self, plan: StepPlan) -> SubmittedStep:
        if self.threads is None:
            return self.inner.submit(plan)
        others = [self.threads.submit(runner.submit, plan) for runner in self.others]
        return RanksStep(self.inner.submit(plan), [other.result() for other in others], self._tickets)

    def close(self) -> None:
        self.inner.close()


def watch_logits(runner: ModelRunner, note: Callable[[int, int, Tensor], None]) -> None:
    """Call `note(row, number of outputs before, logits[V])` for every token that the runner samples from now on."""
    sample = runner._sample

    def noting(plan: StepPlan, outputs: StepOutputs, sampling: Any, plain: bool, windows: Any) -> Any:
        logits = runner._model.head.whole(outputs.own)
        rows, ends = plan.sampled_rows, plan.rows.start + plan.rows.num_tokens - plan.rows.num_drafts
        if runner._records is not None:  # optimistic rows start where the last step's drafts ended
            ends = ends - runner._records.num_rejected.numpy()[runner._records.rejected_at(plan.rows)]
        before = ends[plan.rows.samples] - runner.batch.num_prompt_tokens[rows]
        if windows is not None:
            rows, before = np.repeat(rows, windows.sizes), windows.spread(before)
        for i, (row, num_outputs) in enumerate(zip(rows.tolist(), before.tolist(), strict=True)):
            note(row, num_outputs, logits[i])
        return sample(plan, outputs, sampling, plain, windows)

    runner._sample = noting  # type: ignore[method-assign]

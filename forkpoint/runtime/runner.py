"""StepPlan to StepResult."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forkpoint.cache.layout import CacheLayout
from forkpoint.errors import StepFailedError
from forkpoint.models.context import ForwardContext, StateIndex
from forkpoint.models.decoder import Model
from forkpoint.ops.metadata import DecodeIndex
from forkpoint.ops.table import OpTable
from forkpoint.runtime.batch import Batch
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.platform import CpuPlatform, Platform
from forkpoint.runtime.sampler import PROMPT_TILE_ROWS, Sampler, prompt_logprobs
from forkpoint.sched.plan import Chunk, PendingStep, StepPlan, StepResult, TokenLogprobs

# The state operators of (decode rows, prefill segments) that work on each kind of pool.
_CONV_OPERATORS = ("conv_update", "conv_prefill")
_MATRIX_OPERATORS = ("gdn_decode", "gdn_prefill")


@dataclass(slots=True)
class _Done:
    """A step that ended when it was submitted."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


@dataclass(slots=True)
class _Failed:
    """A step that raised, or that followed one whose failure had not been seen."""

    error: Exception
    runner: ModelRunner

    def result(self) -> StepResult:
        self.runner.failure_seen()
        raise self.error


class ModelRunner:
    """Implements `sched.plan.Runner` on one device: owns the arena's bytes and the batch.

    A plan runs in the order removed rows, moves, added and replaced rows, state copies, forward, sampling.
    State operators that `ops.redirects` does not name (all with `force_state_copy`) find their states copied
    to where they write. When a step raises, its rows and blocks are updated all the same; steps submitted
    before `result()` has raised that failure are not run and raise StepFailedError.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        layout: CacheLayout,
        num_pages: int,
        *,
        max_num_rows: int,
        max_model_len: int,
        force_state_copy: bool = False,
        platform: Platform | None = None,
    ) -> None:
        self.platform = platform or CpuPlatform()
        self.arena = ArenaBuffer(layout, num_pages, self.platform.device)
        self.batch = Batch(layout, max_num_rows, max_model_len, model.config.vocab_size, self.platform)
        self._model = model
        self._state_copy = ops.state_copy
        self._redirects: frozenset[str] = frozenset() if force_state_copy else ops.redirects
        self._sampler = Sampler()
        self._failure: Exception | None = None

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run a plan. Raises only for a plan that contradicts the batch; what the model raises, `result()` does."""
        started = time.perf_counter()
        moved_bytes = self.arena.move(plan.moves)
        self.batch.update(plan)
        if self._failure is not None:
            error = StepFailedError(f"step {plan.step} was not run: a step before it failed with {self._failure!r}")
            return _Failed(error, self)
        try:
            with torch.inference_mode():
                result = self._run(plan)
        except Exception as error:
            self._failure = error
            return _Failed(error, self)
        elapsed = time.perf_counter() - started
        return _Done(replace(result, moved_bytes=moved_bytes, elapsed_s=elapsed))

    def close(self) -> None:
        """Wait for the device; the arena's memory goes with the runner."""
        self.platform.synchronize()

    def failure_seen(self) -> None:
        self._failure = None

    def _run(self, plan: StepPlan) -> StepResult:
        if not plan.num_tokens:
            return StepResult(plan.step, np.empty(0, np.int32))
        context = self.batch.context(plan, self.arena)
        token_ids = self.batch.token_ids(plan)
        context, copied = self._place_states(context)
        hidden = self._model.forward(token_ids, context)
        result = self._sample(plan, hidden)
        prompts = {c.row: self._prompt_logprobs(c, start, hidden) for c, start in _asking(plan, self.batch)}
        return replace(result, prompt_logprobs=prompts, num_tokens=int(token_ids.shape[0]), slot_bytes_copied=copied)

    def _place_states(self, context: ForwardContext) -> tuple[ForwardContext, int]:
        """Copy states for operators that cannot redirect. Returns the indices they get, and the bytes copied."""
        if not context.states:
            return context, 0
        conv_pools = [cache.conv for cache in context.states]
        matrix_pools = [cache.matrix for cache in context.states]
        conv, conv_bytes = self._place(context.conv, _CONV_OPERATORS, conv_pools)
        matrix, matrix_bytes = self._place(context.matrix, _MATRIX_OPERATORS, matrix_pools)
        return replace(context, conv=conv, matrix=matrix), conv_bytes + matrix_bytes

    def _place(self, index: StateIndex, operators: tuple[str, str], pools: list[Tensor]) -> tuple[StateIndex, int]:
        decode, prefill, copied = index.decode, index.prefill, 0
        if len(decode) and operators[0] not in self._redirects:
            copied += self._copy(pools, decode.src, decode.dst)
            decode = DecodeIndex(_in_place(decode.src, decode.dst), decode.dst)
        if len(prefill) and operators[1] not in self._redirects:
            copied += self._copy(pools, prefill.src, prefill.dst)
            prefill = replace(prefill, src=_in_place(prefill.src, prefill.dst))
        return StateIndex(decode, prefill), copied

    def _copy(self, pools: list[Tensor], src: Tensor, dst: Tensor) -> int:
        """One batched copy of the states that have to change place. Returns the bytes copied."""
        moved = torch.nonzero((src != dst) & (dst >= 0)).flatten()
        if not len(moved):
            return 0
        self._state_copy(pools, src[moved], dst[moved])
        return len(moved) * sum(pool[0].numel() * pool.element_size() for pool in pools)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> StepResult:
        rows = plan.sampled_rows
        if not len(rows):
            return StepResult(plan.step, np.empty(0, np.int32))
        last, positions = _sampled_tokens(plan)
        logits = self._model.logits(hidden[self.platform.upload(last)])
        num_outputs = positions - self.batch.num_prompt_tokens[rows]
        sampled = self._sampler.sample(logits, self.batch.sampling(rows), num_outputs)
        self.batch.record(rows, sampled.token_ids)
        return StepResult(
            plan.step,
            sampled.token_ids.cpu().numpy().astype(np.int32),
            tuple(int(rows[i]) for i in sampled.failed),
            {int(rows[i]): entry for i, entry in sampled.logprobs.items()},
        )

    def _prompt_logprobs(self, chunk: Chunk, first: int, hidden: Tensor) -> tuple[tuple[int, TokenLogprobs], ...]:
        """For the prompt tokens that this chunk's tokens predict, in tiles; `first` is the chunk's first token."""
        added = self.batch.row(chunk.row)
        num_top = added.params.prompt_logprobs or 0
        end = min(chunk.end, added.num_prompt_tokens - 1)  # the last prompt token predicts an output
        entries: list[tuple[int, TokenLogprobs]] = []
        for start in range(chunk.start, end, PROMPT_TILE_ROWS):
            stop = min(start + PROMPT_TILE_ROWS, end)
            offset = first - chunk.start
            logits = self._model.logits(hidden[start + offset : stop + offset])
            following = self.platform.upload(added.token_ids[start + 1 : stop + 1].astype(np.int64))
            found = prompt_logprobs(logits, following, num_top)
            entries.extend(zip(range(start + 1, stop + 1), found, strict=True))
        return tuple(entries)


def _in_place(src: Tensor, dst: Tensor) -> Tensor:
    """Where a row's state lies after the copies; a row that stores nothing still reads its source."""
    return torch.where(dst >= 0, dst, src)


def _sampled_tokens(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of each sampled row, in order: the index of its last token in the step, and the position sampled."""
    decodes = plan.decodes
    last = [np.flatnonzero(decodes.samples)]
    positions = [decodes.starts[decodes.samples] + 1]
    total = len(decodes)
    for chunk in plan.chunks:
        total += chunk.end - chunk.start
        if chunk.samples:
            last.append(np.asarray([total - 1]))
            positions.append(np.asarray([chunk.end]))
    return np.concatenate(last), np.concatenate(positions)


def _asking(plan: StepPlan, batch: Batch) -> list[tuple[Chunk, int]]:
    """Chunks whose row wants prompt log-probabilities, with the index of their first token in the step."""
    out, first = [], len(plan.decodes)
    for chunk in plan.chunks:
        added = batch.row(chunk.row)
        if added.wants_prompt_logprobs and chunk.start < added.num_prompt_tokens - 1:
            out.append((chunk, first))
        first += chunk.end - chunk.start
    return out

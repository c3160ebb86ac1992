"""The training loop, limited by steps or by wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.curriculum import RateSchedule, row_length
from train.data import Batch, Feeder, Kind, batches
from train.loss import Loss, LossFunction
from train.model import HybridModel, Rows, make_rows
from train.optimizer import Optimizer, Rates

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Ends the training after `num_steps` or at `deadline` (of time.monotonic), whichever comes first.

    Rates and row lengths follow the larger of the two shares, so they reach their end in either case. Runs that have to
    be repeatable are limited by steps.
    """

    num_steps: int | None = None
    deadline: float | None = None


class Progress:
    """The progress from 0 to 1. The clock starts with the second step, because the first one compiles."""

    def __init__(self, bounds: Bounds) -> None:
        if bounds.num_steps is None and bounds.deadline is None:
            raise ValueError("training has neither a number of steps nor a deadline; give one")
        self._bounds = bounds
        self._start: float | None = None

    def at(self, step: int) -> float:
        """Return the progress before step `step`."""
        bounds, now = self._bounds, time.monotonic()
        share = 0.0 if bounds.num_steps is None else step / bounds.num_steps
        if bounds.deadline is not None and step > 0:
            self._start = now if self._start is None else self._start
            share = max(share, (now - self._start) / max(1e-9, bounds.deadline - self._start))
        return min(share, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run.

    `on_log(record)` is called every `log_every` steps, which also limits how far the host runs ahead. `on_save` is
    called at most every `save_every_s`.
    """

    bounds: Bounds
    seed: int
    rates: Rates
    schedule: RateSchedule
    compiled: bool
    num_ahead: int
    log_every: int = 20
    save_every_s: float = 120.0
    on_log: Callable[[Record], None] = lambda record: None
    on_save: Callable[[], None] = lambda: None
    lengths: Callable[[float, int, int], int] = row_length


def train(model: HybridModel, feeder: Feeder, plan: Plan) -> list[Record]:
    """Train in place. Return the log records."""
    device = model.model.embed_tokens.weight.device
    loss_function = LossFunction(model, plan.compiled)
    optimizer = Optimizer(model.named_parameters(), plan.rates)
    if plan.compiled:
        model.fuse()
    progress, step, share = Progress(plan.bounds), 0, 0.0

    def lengths() -> Iterator[int]:
        while True:
            yield plan.lengths(share, plan.seed, feeder.num_asked)

    source = batches(feeder, lengths(), plan.num_ahead)
    rows: dict[int, Rows] = {}
    log = _Log(plan)
    while (share := progress.at(step)) < 1.0:
        batch = log.waiting_for(source)
        if batch.length not in rows:
            rows[batch.length] = make_rows(model.shape, batch.num_rows, batch.length, device)
        loss = loss_function(*_upload(batch, device), rows[batch.length])
        loss.total.backward()  # type: ignore[no-untyped-call]
        factor = plan.schedule.factor(step, share)
        optimizer.step(factor)
        step += 1
        log.add(step, share, factor, batch, loss)
    return log.records


def _upload(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    arrays = (torch.from_numpy(batch.tokens), torch.from_numpy(batch.kinds))
    if device.type == "cuda":
        arrays = (arrays[0].pin_memory(), arrays[1].pin_memory())
    return arrays[0].to(device, non_blocking=True).long(), arrays[1].to(device, non_blocking=True).long()


class _Log:
    """Sums losses on the device and reads them every `log_every` steps."""

    def __init__(self, plan: Plan) -> None:
        self.records: list[Record] = []
        self._plan = plan
        self._start = self._saved = time.monotonic()
        self._sums: Tensor | None = None
        self._wait_s = 0.0
        self._num_tokens = 0
        self._lengths: dict[int, int] = {}

    def waiting_for(self, source: Iterator[Batch]) -> Batch:
        start = time.monotonic()
        batch = next(source)
        self._wait_s += time.monotonic() - start
        return batch

    def add(self, step: int, progress: float, factor: float, batch: Batch, loss: Loss) -> None:
        self._sums = loss.by_kind if self._sums is None else self._sums + loss.by_kind
        self._num_tokens += len(batch.tokens)
        self._lengths[batch.length] = self._lengths.get(batch.length, 0) + 1
        if step % self._plan.log_every and step != 1:
            return
        sums = self._sums.tolist()  # waits for the device
        self._sums = None
        now = time.monotonic()
        record: Record = {
            "step": step,
            "progress": round(progress, 4),
            "elapsed_s": round(now - self._start, 2),
            "num_tokens": self._num_tokens,
            "rate_factor": round(factor, 4),
            "wait_s": round(self._wait_s, 2),
            "row_lengths": self._lengths,
        }
        for kind in (Kind.GIVEN, Kind.SAID, Kind.SCORED):
            own, count, drafted, draft_count = sums[kind]
            record[f"loss_{kind.name.lower()}"] = round(own / max(1.0, count), 5)
            record[f"mtp_loss_{kind.name.lower()}"] = round(drafted / max(1.0, draft_count), 5)
        self._wait_s, self._lengths = 0.0, {}
        self.records.append(record)
        self._plan.on_log(record)
        if now - self._saved > self._plan.save_every_s:
            self._plan.on_save()
            self._saved = time.monotonic()

"""Graphs of steps that verify drafts: what pads a step is read by nothing else, and writes nothing that is of a row."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.runtime.graphs import ShapeTable
from forkpoint.runtime.runner import ModelRunner
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.plan import TO_DRAFT, StepResult, SubmittedStep
from tests.ops.triton_cases import ON_GPU, triton_ops
from tests.plans import Row, plan_of
from tests.runtime.driver import Driver, tiny_hybrid, tokens
from tests.runtime.test_graphs import RecordingPlatform

pytestmark = pytest.mark.skipif(
    ON_GPU, reason="a graph that is run again needs the interpreter; tests/gpu has real graphs"
)

MOST = 3  # tokens of a window
LENGTHS = (5, 9, 2, 2)  # of the rows: two that decode, two in the middle of their prompts
WINDOWS = [StepShape(count * size, 0, 0, count) for count, size in ((1, 3), (2, 3))]
BESIDE = StepShape(3, 5, 2, 2)


def steps() -> Iterator[tuple[StepShape, tuple[int, ...], tuple[int, ...]]]:
    """Yield (shape, windows of the rows that decode, chunks of the others).

    One row has windows of each length. Of two rows, one has the shortest or the longest window.
    """
    for shape in WINDOWS:
        yield from ((shape, (size,), ()) for size in range(1, MOST + 1))
    yield from ((WINDOWS[-1], own, ()) for own in ((1, 1), (1, MOST), (MOST, 1), (2, MOST), (MOST, MOST)))
    yield from ((BESIDE, *step) for step in (((), (5,)), ((1,), (2, 1)), ((3,), (1,)), ((1, 2), (2, 2))))


class Replays:
    """A runner of rows with drafts behind them, of which only the device knows how many count; it goes back there for
    each step. Nobody has written what is NaN, nor has a row the token of padding."""

    def __init__(self, folder: Path) -> None:
        model = tiny_hybrid(folder, triton_ops(), 1, 1, mtp=True)
        model._embedding[0] = torch.nan
        options = {"platform": RecordingPlatform(), "shapes": [*WINDOWS, BESIDE], "max_num_drafts": MOST - 1}
        self.driver = Driver.create(model, triton_ops(), **options)
        self.runner: ModelRunner = self.driver.runner
        records, drafts = self.runner._records, self.runner._drafts
        assert records is not None and drafts is not None
        lines = [line for _, _, own in records._pending_states for line in own[:3]]
        for line in lines:
            line.fill_(torch.nan)
        self.floats = [self.runner.arena.data.view(-1).view(torch.float32), *lines]
        self.ids = [records.num_rejected, self.runner.batch.last_sampled, drafts.drafted]
        self.books = [value for value in vars(records).values() if isinstance(value, np.ndarray)]
        self.save()
        for x in self.ids:
            x.fill_(5)
        self.fresh = self.left()
        while self.runner.record_next():
            pass
        self.recorded = self.left()
        self.restore()
        self.drafts = drafts._graphs
        self.largest = dict(itertools.islice(self.drafts._padding.items(), 1))  # others would fit better

        prompts = [tokens(length + 9, seed).clip(1) for seed, length in enumerate(LENGTHS)]
        self.slots = [self.driver.slot() for _ in prompts]
        begin = [
            self.driver.chunk(row, 0, length, -1, self.slots[row], samples=row < 2)
            for row, length in enumerate(LENGTHS)
        ]
        self.driver.run(begin, [self.driver.added(row, ids) for row, ids in enumerate(prompts)])
        self.ends, self.optimistic = [*LENGTHS], False
        self.submit((3, 2), ())
        self.ends, self.optimistic = [LENGTHS[0] + 3, LENGTHS[1] + 2, *LENGTHS[2:]], True
        self.save()

    def left(self) -> list[Tensor]:
        """The bytes of arena and records, then what is kept of rows, of which the last one is padding's."""
        return [x.view(torch.int32).clone() for x in self.floats] + [x[: len(self.books[0])].clone() for x in self.ids]

    def save(self) -> None:
        self.before, self.saved = self.left(), copy.deepcopy([*self.floats, *self.ids, *self.books])

    def restore(self) -> None:
        for value, old in zip([*self.floats, *self.ids, *self.books], self.saved, strict=True):
            value[...] = old

    def submit(self, windows: tuple[int, ...], chunks: tuple[int, ...]) -> SubmittedStep:
        """Submit the last rows of each kind, so that their numbers differ from their places."""
        plan, known = list[Row](), self.runner.batch.rows
        for row, size in enumerate(windows, 2 - len(windows)):
            given = (self.ends[row], [-1, *[TO_DRAFT] * (size - 1)], self.slots[row], self.slots[row])
            own = Row(row, *given, num_drafts=size - 1, decodes=True, optimistic=self.optimistic)
            plan.append(replace(own, pending=(3, 2)[row] if self.optimistic else 0))
        for row, size in enumerate(chunks, 4 - len(chunks)):
            start, slot = LENGTHS[row], self.slots[row]
            plan.append(Row(row, start, known[row].token_ids[start : start + size], slot, slot))
        return self.runner.submit(plan_of(2, plan))

    def after(
        self, shape: StepShape | None, windows: tuple[int, ...], chunks: tuple[int, ...]
    ) -> tuple[StepResult, list[Tensor]]:
        """A step in the graph of that shape, or launched, and what it leaves."""
        self.restore()
        for graphs in (self.runner._graphs, self.drafts):
            graphs._region.device.fill_(0x55)
        self.runner._shapes = ShapeTable([] if shape is None else [shape])
        self.drafts._padding = {} if shape is None else self.largest
        result = self.submit(windows, chunks).result()
        assert result.replayed == (shape is not None)
        return result, self.left()


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Replays:
    return Replays(tmp_path_factory.mktemp("model"))


def test_recording_writes_nothing_that_is_of_a_row(replays: Replays) -> None:
    """What compiles, or times, the kernels of a step runs them more than once; states would go on each time."""
    assert all(torch.equal(x, old) for x, old in zip(replays.recorded, replays.fresh, strict=True))


def test_a_step_does_the_same_again_from_what_it_found(replays: Replays) -> None:
    """Though positions are put right in the graph's own inputs, for optimistic rows."""
    (want, left), (got, found) = (replays.after(BESIDE, (1, 2), (2, 2)) for _ in range(2))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert all(torch.equal(x, other) for x, other in zip(found, left, strict=True))


@pytest.mark.slow
def test_a_graph_serves_steps_with_fewer_tokens_than_it_has_room_for(replays: Replays) -> None:
    launched = dict[Any, Any]()
    for shape, *step in steps():
        if tuple(step) not in launched:
            launched[tuple(step)] = replays.after(None, *step)
        want, left = launched[tuple(step)]
        got, found = replays.after(shape, *step)
        what = f"{shape}, {step}"
        assert got.token_ids.tolist() == want.token_ids.tolist() and got.failed_rows == (), what
        assert np.array_equal(got.counts, want.counts), what
        for mine, other, before in zip(found[:-1], left, replays.before, strict=False):  # drafts may be more than asked
            if mine.dtype != torch.int32:
                assert torch.equal(mine, other), what
            else:  # a product of more rows has other last bits
                values = [x.view(torch.float32) for x in (mine, other)]
                torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5, equal_nan=True, msg=what)
                assert torch.equal(mine[other == before], before[other == before]), what

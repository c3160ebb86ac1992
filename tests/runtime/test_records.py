"""States that are written every few tokens: a row that begins has a whole one, wherever it reads it, and what a row
needs that leaves is there from the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forkpoint.models.decoder import Model
from forkpoint.ops.select import torch_table
from forkpoint.runtime.step_inputs import StepShape
from forkpoint.sched.plan import Move, MoveKind
from tests.runtime.driver import Driver, tiny_hybrid, tokens
from tests.runtime.test_graphs import RecordingPlatform


def play(model: Model, interval: int) -> list[list[int]]:
    driver = Driver.create(model, state_write_interval=interval)
    prompt, other = tokens(67, 1), tokens(9, 2)
    saved, first, second, third, fourth = (driver.slot() for _ in range(5))
    chunk = driver.chunk(1, 0, 67, -1, first, [(64, saved)], samples=True)
    driver.run([chunk], added=[driver.added(1, prompt)])
    own = driver.chunk(0, 0, 9, -1, second, samples=True)
    beside = driver.decode(1, 67, first, third)  # to another slot, between two writes
    driver.run([beside, own], added=[driver.added(0, other)])
    driver.run([driver.decode(1, 68, third, third), driver.decode(0, 9, second, second)])
    # The row is another request's now, which resumes at a checkpoint by a decode step.
    added = driver.added(0, prompt, block_ids=chunk.new_blocks[:1])
    driver._lengths[0] = 64
    for i in range(3):
        resumed = driver.decode(0, 64 + i, fourth if i else saved, fourth, int(prompt[64 + i]))
        changes: dict[str, Any] = {}
        if not i:
            driver.lags.leave(0, second)
            changes = {"added": [added], "removed": (0,)}
        driver.run([driver.decode(1, 69 + i, third, third), resumed], **changes)
    return [driver.outputs[row] for row in range(2)]


def test_a_row_that_begins_reads_a_whole_state(tmp_path: Path) -> None:
    model = tiny_hybrid(tmp_path)
    assert play(model, 8) == play(model, 1)


def play_flushed(model: Model, interval: int, moved: bool) -> list[int]:
    """A row stops at 64 tokens and leaves; then another row resumes from the state. The plan that removes the row may
    move its slot."""
    driver = Driver.create(model, state_write_interval=interval)
    prompt, other = tokens(64, 1), tokens(9, 2)
    first, second, target = (driver.slot() for _ in range(3))
    chunk = driver.chunk(0, 0, 61, -1, first)
    driver.run(
        [chunk, driver.chunk(1, 0, 9, -1, second, samples=True)], [driver.added(0, prompt), driver.added(1, other)]
    )
    for start in range(61, 64):
        driver.run(
            [driver.decode(0, start, first, first, int(prompt[start])), driver.decode(1, start - 52, second, second)]
        )
    driver.run([driver.decode(1, 12, second, second)])
    moves = (Move(MoveKind.SLOT, first, target),) if moved else ()
    added = driver.added(2, tokens(70, 1), block_ids=chunk.new_blocks[:1])
    resumed = driver.chunk(2, 64, 70, target if moved else first, driver.slot(), samples=True)
    driver.run([resumed], [added], removed=(0,), flushes=(driver.lags.leave(0, first),), moves=moves)
    return driver.outputs[2] + driver.outputs[1]


def test_the_state_of_a_row_that_leaves_is_whole_before_its_slot_moves(tmp_path: Path) -> None:
    """The first 61 tokens are prefilled, and the records of the other three are folded when the row leaves."""
    model = tiny_hybrid(tmp_path)
    assert play_flushed(model, 8, True) == play_flushed(model, 8, False) == play_flushed(model, 1, False)


@pytest.mark.parametrize(("drafts", "interval"), [(2, 1), (2, 8), (0, 8)])
def test_folds_are_compiled_at_the_start(tmp_path: Path, drafts: int, interval: int) -> None:
    """Nothing is folded, but every kernel that a row may need which leaves at a boundary has run."""
    plain, called = torch_table(), list[str]()

    def noting(name: str) -> Any:
        return lambda *given: [called.append(name), getattr(plain, name)(*given)][1]

    names = ("conv_fold", "recurrence_fold", "recurrence_flush")
    ops = replace(plain, **{name: noting(name) for name in names})
    options = {"max_num_drafts": drafts, "state_write_interval": interval, "platform": RecordingPlatform()}
    driver = Driver.create(tiny_hybrid(tmp_path, ops, 1), ops, shapes=[StepShape(4, 0, 0)], **options)
    driver.runner.record_largest()
    assert set(called) == {"recurrence_flush" if interval > 1 else "recurrence_fold", *["conv_fold"][:drafts]}

"""What the engine makes of ranks that do not answer alike."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from unittest.mock import Mock

import numpy as np
import pytest

from forkpoint.errors import EngineStoppedError, StepFailedError
from forkpoint.sched.plan import StepPlan, StepResult
from forkpoint.worker import remote
from forkpoint.worker.codec import encoder
from forkpoint.worker.remote import RankProcess, RemoteRunner, StepAnswer

RESULT = StepResult(0, np.asarray([5], np.int32))
Ranks = tuple[RemoteRunner, list[Connection]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two ranks that the test speaks for."""
    pipes = [Pipe() for _ in range(2)]
    process = Mock(SpawnProcess, exitcode=-9)
    process.is_alive.return_value = False
    runner = RemoteRunner([RankProcess(f"rank {i}", here, process) for i, (here, _) in enumerate(pipes)])
    yield runner, [there for _, there in pipes]
    runner.close()


def say(ranks: list[Connection], *answers: StepAnswer) -> None:
    for socket, answer in zip(ranks, answers, strict=False):
        socket.send_bytes(encoder()(answer))


def test_the_first_rank_answers(ranks: Ranks) -> None:
    runner, others = ranks
    step = runner.submit(StepPlan(0))
    say(others, StepAnswer(RESULT, 7), StepAnswer(None, 7))
    assert step.result().token_ids.tolist() == [5]


def test_all_ranks_prepare(ranks: Ranks) -> None:
    runner, others = ranks
    for answers in ((True, False), (False, False)):
        for socket, answer in zip(others, answers, strict=True):
            socket.send(answer)
        assert runner.prepare() == any(answers)
        assert [socket.recv_bytes() for socket in others] == [remote.PREPARE] * 2


def test_a_step_that_fails_everywhere_is_a_failed_step(ranks: Ranks) -> None:
    runner, others = ranks
    step = runner.submit(StepPlan(0))
    say(others, StepAnswer(failure="no room"), StepAnswer(failure="no room"))
    with pytest.raises(StepFailedError, match="no room"):
        step.result()


def test_other_tokens_end_all(ranks: Ranks) -> None:
    runner, others = ranks
    say(others, StepAnswer(RESULT, 7), StepAnswer(None, 8))
    with pytest.raises(EngineStoppedError, match="rank 1 sampled other tokens than rank 0"):
        runner.answer()


@pytest.mark.parametrize("waits", [True, False], ids=["the other waits for it", "the other went on"])
def test_a_rank_that_fails_alone_ends_all(ranks: Ranks, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "APART_S", 0.1)
    runner, others = ranks
    say(others[1:], StepAnswer(failure="no room"))
    if not waits:
        say(others[:1], StepAnswer(RESULT, 7))
    with pytest.raises(EngineStoppedError, match="rank 1 failed where others did not: no room"):
        runner.answer()
    with pytest.raises(EngineStoppedError, match="rank 1 failed"):
        runner.submit(StepPlan(1))


def test_a_rank_that_is_gone_is_named(ranks: Ranks) -> None:
    runner, others = ranks
    others[1].close()
    with pytest.raises(EngineStoppedError, match="the rank 1 process was killed by SIGKILL"):
        runner.answer()

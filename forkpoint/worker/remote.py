"""A worker in processes of its own, one for each rank. Plans go there, and results come back, through local sockets.

Each plan is one message to all ranks, and an empty message asks for the answer to the oldest plan that was not asked
for yet, so that a rank writes only to an engine that reads. The end of the socket ends the rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec

from forkpoint.config import EngineConfig
from forkpoint.errors import EngineStoppedError, ForkpointError, StepFailedError
from forkpoint.obs.logs import LOGGER, set_up_logging
from forkpoint.sched.plan import StepPlan, StepResult, SubmittedStep
from forkpoint.worker.child import begin_child, how_it_ended, start_child
from forkpoint.worker.codec import Failure, decoder, encoder
from forkpoint.worker.worker import Worker, WorkerFacts

STOP_TIMEOUT_S = 10.0  # for the device to finish and the worker to end; then it is killed
APART_S = 3.0  # that ranks may be apart in failing; then those that have not answered wait for one that gave up
MEETING = "ranks"  # the file where ranks meet


class StepAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A step's result, or why there is none; `refused`: the plan contradicts what the worker has.

    Of ranks other than the first the result is left out. `digest` is of the sampled ids.
    """

    result: StepResult | None = None
    digest: int = 0
    failure: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class RankProcess:
    """`name` is what the log and errors call it."""

    name: str
    socket: Connection
    process: BaseProcess


def start_worker(config: EngineConfig) -> Worker:
    """Start a process for each rank, and wait until all have built their worker. Raises what `build_worker` raises
    there."""
    return start_ranks([config] * config.tensor_parallel_size)


def start_ranks(configs: Sequence[EngineConfig]) -> Worker:
    """The same with the options of each rank."""
    meeting = tempfile.TemporaryDirectory(prefix="forkpoint-", ignore_cleanup_errors=True) if len(configs) > 1 else None
    with meeting or contextlib.nullcontext() as folder:
        place = None if folder is None else Path(folder, MEETING)
        ranks = []
        for rank, config in enumerate(configs):
            here, there = multiprocessing.Pipe()
            process = start_child(serve_worker, config, rank, place, there, name=f"worker-{rank}")
            there.close()
            ranks.append(RankProcess("worker" if place is None else f"rank {rank}", here, process))
        runner = RemoteRunner(ranks)
        return Worker(runner.wait_until_built(), runner, lambda: None, runner.check)


class RemoteRunner:
    """Implements `sched.plan.Runner` by processes. Results are to be asked for in the order of the plans.

    A rank that dies, or fails where others do not, ends all of them.
    """

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self._ranks = ranks
        self._encode, self._decode = encoder(), decoder(StepAnswer)
        self._why: str | None = None  # the ranks were ended
        self._end = Finalize(self, _end, (ranks,), exitpriority=1)  # at the latest when this process ends

    def wait_until_built(self) -> WorkerFacts:
        """What the first rank says of itself. Raises what building a worker raised."""
        facts: WorkerFacts | None = None
        waiting = {rank.socket: rank for rank in self._ranks}
        while waiting:
            for socket in connection.wait(list(waiting)):
                assert isinstance(socket, Connection)
                rank = waiting.pop(socket)
                try:
                    message = socket.recv()
                except (EOFError, OSError):
                    raise self._gone(rank) from None
                if isinstance(message, Failure):
                    _end(self._ranks, kill=len(self._ranks) > 1)  # the others wait for this one
                    raise message.error()
                assert isinstance(message, WorkerFacts)
                facts = message if rank is self._ranks[0] else facts
        assert facts is not None
        return facts

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Send a plan. Raises EngineStoppedError where a rank is gone."""
        self._send(self._encode(plan))
        return _RemoteStep(self, plan.step)

    def answer(self) -> StepAnswer:
        """The first rank's, to the oldest plan that was not asked for. Raises EngineStoppedError where a rank is gone,
        or the ranks are no longer in step."""
        self._send(b"")
        answers: dict[str, StepAnswer] = {}
        waiting: dict[Connection, RankProcess] = {rank.socket: rank for rank in self._ranks}
        until: float | None = None
        while waiting:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = connection.wait(list(waiting), left) if len(waiting) > 1 or until else list(waiting)
            if not ready:
                break
            for socket in ready:
                assert isinstance(socket, Connection)
                rank = waiting.pop(socket)
                try:
                    answer: StepAnswer = self._decode(socket.recv_bytes())
                except (EOFError, OSError):
                    raise self._gone(rank) from None
                answers[rank.name] = answer
                if answer.failure and until is None:
                    until = time.monotonic() + APART_S
        first = answers.get(self._ranks[0].name)
        failed = {name: answer.failure for name, answer in answers.items() if answer.failure}
        if waiting or first is None or 0 < len(failed) < len(answers):
            name, failure = next(iter(failed.items()))
            raise self._stopped(f"{name} failed where others did not: {failure}")
        for name, answer in answers.items():
            if answer.digest != first.digest:
                raise self._stopped(f"{name} sampled other tokens than {self._ranks[0].name}")
        return first

    def check(self) -> None:
        """Raises EngineStoppedError where a rank is gone."""
        for rank in self._ranks:
            if not rank.process.is_alive():
                raise self._gone(rank)

    def close(self) -> None:
        """Let the ranks end, and wait for them; harmless a second time."""
        self._end()

    def _send(self, data: bytes) -> None:
        for rank in self._ranks:
            try:
                rank.socket.send_bytes(data)
            except OSError:
                raise self._gone(rank) from None

    def _gone(self, rank: RankProcess) -> EngineStoppedError:
        """Why a rank does not answer; the others, which may wait for it, go too."""
        rank.process.join(STOP_TIMEOUT_S)
        return self._stopped(f"the {rank.name} process {how_it_ended(rank.process.exitcode)}")

    def _stopped(self, why: str) -> EngineStoppedError:
        self._why = self._why or why
        _end(self._ranks, kill=True)
        return EngineStoppedError(self._why)


def _end(ranks: Sequence[RankProcess], kill: bool = False) -> None:
    for rank in ranks:
        rank.socket.close()
    until = time.monotonic() + (0.0 if kill else STOP_TIMEOUT_S)
    for rank in ranks:
        rank.process.join(max(0.0, until - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()


@dataclass(frozen=True, slots=True)
class _RemoteStep:
    runner: RemoteRunner
    step: int

    def result(self) -> StepResult:
        answer = self.runner.answer()
        if answer.refused:
            raise EngineStoppedError(f"step {self.step} was refused and the engine stops: {answer.failure}")
        if answer.result is None:
            raise StepFailedError(answer.failure)
        return answer.result


def serve_worker(config: EngineConfig, rank: int, place: Path | None, socket: Connection) -> None:
    """The process: build the worker, say what it is, and run plans until the engine is gone."""
    begin_child()
    set_up_logging(config.log_level if rank == 0 else "error")
    try:
        from forkpoint.worker.build import build_worker  # imports torch, which an engine has no use for

        worker = build_worker(config, rank, place)
    except Exception as error:
        if not isinstance(error, ForkpointError):
            LOGGER.exception("rank %d cannot be built", rank)
        with contextlib.suppress(OSError):  # another rank's failure was heard first
            socket.send(Failure.of(error))
        return
    try:
        socket.send(worker.facts)
        _run_plans(worker, socket, rank)
    except (EOFError, OSError):
        worker.runner.close()


def _run_plans(worker: Worker, socket: Connection, rank: int) -> None:
    encode, decode = encoder(), decoder(StepPlan)
    steps: deque[SubmittedStep | StepAnswer] = deque()
    while True:
        data = socket.recv_bytes()
        if not data:
            socket.send_bytes(encode(_answer(steps.popleft(), rank)))
            continue
        try:
            steps.append(worker.runner.submit(decode(data)))
        except Exception as error:  # what the model raises comes with the result; this is a plan gone wrong
            steps.append(StepAnswer(failure=str(error), refused=True))


def _answer(step: SubmittedStep | StepAnswer, rank: int) -> StepAnswer:
    if isinstance(step, StepAnswer):
        return step
    try:
        result = step.result()
    except Exception as error:
        LOGGER.debug("a step failed", exc_info=error)
        return StepAnswer(failure=f"{type(error).__name__}: {error}")
    return StepAnswer(None if rank else result, zlib.crc32(result.token_ids.tobytes()))

"""A worker in processes of its own, one for each rank, connected by local sockets.

Each plan is one message to all ranks. An empty message asks for the answer to the oldest plan without one, so that a
rank writes only when the engine reads. PREPARE asks for a call of `Worker.prepare`. A rank ends when its socket is
closed.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec

from forkpoint.config import EngineConfig
from forkpoint.errors import EngineStoppedError, ForkpointError, StepFailedError
from forkpoint.images import ImageSpan
from forkpoint.obs.logs import LOGGER, set_up_logging
from forkpoint.quick_imports import collection_paused
from forkpoint.sched.plan import AddedRow, FetchReport, StepPlan, StepResult, SubmittedStep, TierReport
from forkpoint.shared_arrays import in_shared_memory
from forkpoint.worker.child import begin_child, how_it_ended, start_child
from forkpoint.worker.codec import Failure, decoder, encoder
from forkpoint.worker.disk_ranks import TierTickets, common_disk
from forkpoint.worker.peer_ranks import FetchTickets, common_peers
from forkpoint.worker.worker import Worker, WorkerFacts

STOP_TIMEOUT_S = 10.0  # time for the device to finish and the worker to end; then the worker is killed
APART_S = 3.0  # ranks that have not answered so long after another one failed are waiting for it
PREPARE = b"\xc1"  # a byte that no message in msgpack begins with
MEETING = "ranks"  # name of the file through which ranks find each other


class StepAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A step's result, or why there is none.

    `refused`: the plan contradicts the worker's batch. Only the first rank sends the result; all send the `digest` of
    the sampled ids, and the reports of their tiers and fetches.
    """

    result: StepResult | None = None
    digest: int = 0
    failure: str = ""
    refused: bool = False
    tier_report: TierReport | None = None
    fetch_report: FetchReport | None = None


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank. Log lines and errors use its `name`."""

    name: str
    socket: Connection
    process: BaseProcess


def start_ranks(configs: Sequence[EngineConfig]) -> Worker:
    """Start a process for each rank, with its own one of `configs`, and wait until all have built their worker.

    Raises what `build_worker` raises there, or EngineStoppedError if a process ends.
    """
    with contextlib.ExitStack() as stack:
        place, names = None, ["worker"]
        if len(configs) > 1:
            meeting = tempfile.TemporaryDirectory(prefix="forkpoint-", ignore_cleanup_errors=True)
            place, names = Path(stack.enter_context(meeting), MEETING), [f"rank {rank}" for rank in range(len(configs))]
        ranks = []
        for rank, config in enumerate(configs):
            here, there = multiprocessing.Pipe()
            process = start_child(serve_worker, config, rank, place, there, name=f"worker-{rank}")
            there.close()
            ranks.append(RankProcess(names[rank], here, process))
        runner = RemoteRunner(ranks)
        return Worker(runner.wait_until_built(), runner, lambda: None, runner.check, runner.prepare)


class RemoteRunner:
    """Implements `sched.plan.Runner` with processes. Ask for results in the order of the plans.

    If a rank dies, or fails a step that others do not fail, all of them are ended.
    """

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self._ranks = ranks
        self._encode, self._decode = encoder(), decoder(StepAnswer)
        self._why: str | None = None  # why the ranks were ended
        self._tickets, self._fetches = TierTickets(len(ranks)), FetchTickets(len(ranks))
        self._end = Finalize(self, _end, (ranks,), exitpriority=1)  # runs when this process ends, at the latest

    def wait_until_built(self) -> WorkerFacts:
        """Wait for all ranks, and return the first one's facts with the disk and the ports that all share.

        Raises what building a worker raised; all ranks have ended then.
        """
        facts: dict[str, WorkerFacts] = {}
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
                facts[rank.name] = message
        found = [facts[rank.name] for rank in self._ranks]
        disk, peers = common_disk([each.disk for each in found]), common_peers([each.peers for each in found])
        return replace(found[0], disk=disk, peers=peers)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Send a plan, with large images in shared memory. Raises EngineStoppedError if a rank has ended."""
        plan = replace(plan, added=tuple(map(_with_shared_pixels, plan.added)))
        self._send(self._encode(plan))
        return _RemoteStep(self, plan.step, [added.images for added in plan.added])

    def answer(self) -> StepAnswer:
        """Return the first rank's answer to the oldest plan without one, with the reports of all ranks.

        Raises EngineStoppedError, after ending all ranks, if one has ended or they disagree.
        """
        self._send(b"")
        answers = self._collect()
        failed = {name: answer.failure for name, answer in answers.items() if answer.failure}
        if len(answers) < len(self._ranks) or 0 < len(failed) < len(answers):
            name, failure = next(iter(failed.items()))
            raise self._stopped(f"{name} failed where others did not: {failure}")
        first = answers[self._ranks[0].name]
        for name, answer in answers.items():
            if answer.digest != first.digest:
                raise self._stopped(f"{name} sampled other tokens than {self._ranks[0].name}")
        tiers = self._tickets.merge([each.tier_report for each in answers.values() if each.tier_report is not None])
        fetches = self._fetches.merge([answers[rank.name].fetch_report for rank in self._ranks])
        if (tiers is not None or fetches is not None) and first.result is not None:
            return msgspec.structs.replace(first, result=replace(first.result, tier_report=tiers, fetch_report=fetches))
        return first

    def _collect(self) -> dict[str, StepAnswer]:
        """Return the ranks' answers by name. Those that come more than APART_S after a failure are missing.

        Raises EngineStoppedError, after ending all ranks, if one has ended.
        """
        answers: dict[str, StepAnswer] = {}
        waiting = {rank.socket: rank for rank in self._ranks}
        until: float | None = None
        while waiting:
            ready: Sequence[object] = list(waiting)
            if len(waiting) > 1 or until is not None:  # otherwise `recv_bytes` waits for the last one
                ready = connection.wait(list(waiting), None if until is None else max(0.0, until - time.monotonic()))
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
        return answers

    def prepare(self) -> bool:
        """Let all ranks do work ahead; see `Worker`. Raises EngineStoppedError if a rank has ended."""
        self._send(PREPARE)
        answers = []
        for rank in self._ranks:
            try:
                answers.append(bool(rank.socket.recv()))
            except (EOFError, OSError):
                raise self._gone(rank) from None
        return any(answers)

    def check(self) -> None:
        """Raise EngineStoppedError, after ending all ranks, if one has ended."""
        for rank in self._ranks:
            if not rank.process.is_alive():
                raise self._gone(rank)

    def close(self) -> None:
        """End the ranks and wait for them. A second call does nothing."""
        self._end()

    def _send(self, data: bytes) -> None:
        for rank in self._ranks:
            try:
                rank.socket.send_bytes(data)
            except OSError:
                raise self._gone(rank) from None

    def _gone(self, rank: RankProcess) -> EngineStoppedError:
        """Kill all ranks, and return the error to raise because one has ended: the first reason ever found."""
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


def _with_shared_pixels(added: AddedRow) -> AddedRow:
    if not added.images:
        return added
    return replace(added, images=tuple(replace(image, pixels=in_shared_memory(image.pixels)) for image in added.images))


@dataclass(frozen=True, slots=True)
class _RemoteStep:
    """A step whose result is to come. The ranks may not have opened its images' pixels before."""

    runner: RemoteRunner
    step: int
    images: Sequence[Sequence[ImageSpan]] = field(repr=False)

    def result(self) -> StepResult:
        answer = self.runner.answer()
        if answer.refused:
            raise EngineStoppedError(f"step {self.step} was refused and the engine stops: {answer.failure}")
        if answer.result is None:
            raise StepFailedError(answer.failure)
        return answer.result


def serve_worker(config: EngineConfig, rank: int, place: Path | None, socket: Connection) -> None:
    """Run in a rank's process: build the worker, send its facts or its Failure, and run plans.

    Returns when `socket` is closed, or if building failed.
    """
    begin_child()
    set_up_logging(config.log_level if rank == 0 else "error")
    try:
        with collection_paused():
            from forkpoint.worker.build import build_worker  # imports torch, which the engine does not need
        gc.freeze()  # so that no collection, as at the end of a process, examines what was imported

        worker = build_worker(config, rank, place)
    except Exception as error:
        if not isinstance(error, ForkpointError):
            LOGGER.exception("rank %d cannot be built", rank)
        with contextlib.suppress(OSError):  # the engine ended after another rank's failure
            socket.send(Failure.of(error))
        return
    if rank and config.log_level != "error":
        set_up_logging("warning")  # from now on an error, such as one of its disk, may be of this rank alone
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
        if data == PREPARE:
            socket.send(worker.prepare())
            continue
        try:
            steps.append(worker.runner.submit(decode(data)))
        except Exception as error:  # the plan contradicts the batch; errors of the model come with the result
            steps.append(StepAnswer(failure=str(error), refused=True))


def _answer(step: SubmittedStep | StepAnswer, rank: int) -> StepAnswer:
    if isinstance(step, StepAnswer):
        return step
    try:
        result = step.result()
    except Exception as error:
        LOGGER.debug("a step failed", exc_info=error)
        return StepAnswer(failure=f"{type(error).__name__}: {error}")
    digest = zlib.crc32(result.token_ids.tobytes())
    own = None if rank else replace(result, tier_report=None, fetch_report=None)
    return StepAnswer(own, digest, tier_report=result.tier_report, fetch_report=result.fetch_report)

"""Starts the engine process, talks to it over two local sockets, and notices when it ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.context import SpawnProcess

import zmq

from forkpoint.config import EngineConfig
from forkpoint.engine.messages import Command, Died, Report, Stop
from forkpoint.engine.process import run_engine
from forkpoint.errors import ConfigError, EngineStoppedError, ForkpointError
from forkpoint.obs.logs import LOGGER
from forkpoint.worker.child import how_it_ended, start_child
from forkpoint.worker.codec import decoder, encoder
from forkpoint.worker.threads import wait_briefly

STOP_TIMEOUT_S = 3.0  # for the engine to end by itself; then it is killed, in the middle of a compilation, say
LAST_WORDS_S = 0.2  # for reports that were under way when the process ended


class EngineProcess:
    """The other end of `run_engine`. All methods belong to one event loop.

    `on_report` is called with each report, `on_exit` once, with the reason, when the process ended unasked.
    """

    def __init__(
        self, config: EngineConfig, on_report: Callable[[Report], None], on_exit: Callable[[ForkpointError], None]
    ) -> None:
        self._config = config
        self._on_report = on_report
        self._on_exit = on_exit
        self._encode, self._decode = encoder(), decoder(Report)
        self._process: SpawnProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._is_ending = False  # it has said so

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Spawn the process; its reports come in through `loop`. Raises ConfigError without a place for sockets."""
        try:
            self._folder = tempfile.mkdtemp(prefix="forkpoint-")  # readable by this user alone
        except OSError as error:
            raise ConfigError(f"no folder for the engine's sockets: {error}; set TMPDIR to a writable one") from error
        self._context = zmq.Context()
        self._commands, self._reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._reports.set_hwm(0)
        names = [f"ipc://{self._folder}/{name}" for name in ("commands", "reports")]
        self._commands.connect(names[0])  # not bind: a bound socket cannot send before the other side is there
        self._reports.bind(names[1])
        wait_briefly()
        self._process = start_child(run_engine, self._config, *names, name="engine")
        self._loop = loop
        loop.add_reader(self._reports.FD, self._receive)
        loop.add_reader(self._process.sentinel, self._ended)
        self._receive()

    def send(self, command: Command) -> None:
        self._commands.send(self._encode(command))

    async def stop(self, *, gently: bool) -> None:
        """End the process and remove the sockets; harmless a second time, and before `start`. `gently`: let it give
        its memory back, which it cannot while it is loading."""
        if self._stopped or self._process is None or self._loop is None:
            return
        self._stopped = True
        self._loop.remove_reader(self._reports.FD)
        self._loop.remove_reader(self._process.sentinel)
        if gently and self._process.is_alive():
            self.send(Stop())
        if gently or self._is_ending:
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> None:
        """Take in all reports: the descriptor tells only that something changed."""
        while not self._stopped:
            try:
                data = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                report = self._decode(data)
                self._is_ending = self._is_ending or isinstance(report, Died)
                self._on_report(report)
            except Exception as error:  # this side no longer knows where each request stands
                LOGGER.exception("a report of the engine could not be taken in")
                self._on_exit(EngineStoppedError(f"a report of the engine could not be taken in: {error!r}"))

    def _ended(self) -> None:
        assert self._loop is not None and self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(LAST_WORDS_S, self._tell_end)

    def _tell_end(self) -> None:
        if not self._stopped:
            self._receive()
            assert self._process is not None
            self._process.join()
            self._on_exit(EngineStoppedError(f"the engine process {how_it_ended(self._process.exitcode)}"))

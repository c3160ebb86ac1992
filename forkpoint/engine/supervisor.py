"""Starts the engine process, exchanges messages with it over two local sockets, and notices when it ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess

import zmq

from forkpoint.config import EngineConfig
from forkpoint.engine.core import SAVE_S
from forkpoint.engine.messages import AddSequence, Command, Died, ImagesTaken, Report, Stop
from forkpoint.engine.process import run_engine
from forkpoint.errors import ConfigError, EngineStoppedError, ForkpointError
from forkpoint.images import ImageSpan
from forkpoint.obs.logs import LOGGER
from forkpoint.worker.child import how_it_ended, start_child
from forkpoint.worker.codec import decoder, encoder
from forkpoint.worker.threads import wait_briefly

STOP_TIMEOUT_S = 3.0  # seconds for the engine to end by itself before it is killed; it may be busy compiling
LAST_WORDS_S = 0.2  # seconds to wait for reports that were sent just before the process ended


class EngineProcess:
    """The API process's side of `run_engine`. All methods belong to one event loop.

    `on_report` is called with each report. `on_exit` is called once, with the reason, if the process ends unasked.
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
        self._is_ending = False  # it has sent Died
        self._untaken: dict[str, Sequence[ImageSpan]] = {}  # images in shared memory that the engine has to open

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Spawn the process and read its reports in `loop`. Raises ConfigError without a writable folder."""
        try:
            self._folder = tempfile.mkdtemp(prefix="forkpoint-")  # readable by this user alone
        except OSError as error:
            raise ConfigError(
                f"the folder of the engine's sockets cannot be created: {error}; set TMPDIR to a writable folder"
            ) from error
        self._context = zmq.Context()
        self._commands, self._reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._reports.set_hwm(0)
        names = [f"ipc://{self._folder}/{name}" for name in ("commands", "reports")]
        self._commands.connect(names[0])  # connect, because a bound socket cannot send before the other side is there
        self._reports.bind(names[1])
        wait_briefly()
        self._process = start_child(run_engine, self._config, *names, name="engine")
        self._loop = loop
        loop.add_reader(self._reports.FD, self._receive)
        loop.add_reader(self._process.sentinel, self._ended)
        self._receive()

    def send(self, command: Command) -> None:
        if isinstance(command, AddSequence) and command.request.images:
            self._untaken[command.request.id] = command.request.images
        self._commands.send(self._encode(command))

    async def stop(self, *, gently: bool) -> None:
        """End the process and remove the sockets. Does nothing before `start` or a second time.

        `gently`: give the process time to end by itself and store its cache, which it cannot do while it is loading.
        """
        if self._stopped or self._process is None or self._loop is None:
            return
        self._stopped = True
        self._loop.remove_reader(self._reports.FD)
        self._loop.remove_reader(self._process.sentinel)
        if gently and self._process.is_alive():
            self.send(Stop())
        if gently or self._is_ending:
            saving_s = SAVE_S if self._config.kv_disk_path is not None else 0.0
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S + saving_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> None:
        """Read all reports, because the descriptor signals only that something changed."""
        while not self._stopped:
            try:
                data = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                report = self._decode(data)
                self._is_ending = self._is_ending or isinstance(report, Died)
                if isinstance(report, ImagesTaken):
                    self._untaken.pop(report.id, None)
                else:
                    self._on_report(report)
            except Exception as error:  # this side can no longer know the state of each request
                LOGGER.exception("a report of the engine could not be processed")
                self._on_exit(EngineStoppedError(f"a report of the engine could not be processed: {error!r}"))

    def _ended(self) -> None:
        assert self._loop is not None and self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(LAST_WORDS_S, self._report_end)

    def _report_end(self) -> None:
        if not self._stopped:
            self._receive()
            assert self._process is not None
            self._process.join()
            self._on_exit(EngineStoppedError(f"the engine process {how_it_ended(self._process.exitcode)}"))

"""The life cycle of the server: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from forkpoint.config import EngineConfig
from forkpoint.engine.async_engine import AsyncEngine
from forkpoint.engine.chat import read_template
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import EngineStoppedError, ForkpointError
from forkpoint.obs.logs import LOGGER, Reading, counted, is_idle, load_line, set_up_logging
from forkpoint.server.app import create_app
from forkpoint.server.config import ServerConfig
from forkpoint.server.connections import RESERVED_FILES, Connection, Connections, raise_file_limit
from forkpoint.server.handshake import Handshake
from forkpoint.server.listener import listen, tls_context, url
from forkpoint.server.metrics import Metrics
from forkpoint.server.readers import Readers
from forkpoint.server.service import Service
from forkpoint.server.texts import Facts, Texts

OK, FAILED = 0, 1  # exit codes
LAST_ANSWERS_S = 2.0  # after the engine has died: time for errors to reach open requests, and for probes to see 503


def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit code: 0, or 1 if the engine died.

    Raises ConfigError if the server cannot listen at the address, or if a file for HTTPS or the chat template is wrong,
    and the errors of loading the model.
    """
    tls_context(config)
    if not (engine.chat_template or "").isidentifier():  # such a name may be that of one of the model's own templates
        read_template(engine.chat_template)
    set_up_logging(engine.log_level)
    # prometheus_client would add to each metric a series with its time of creation, which nobody reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    with opened(engine, config) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run())


@contextlib.contextmanager
def opened(engine: EngineConfig, config: ServerConfig) -> Iterator[ApiServer]:
    """Yield a server that listens, and whose readers begin to load. Enter this before the process has threads.

    Raises ConfigError if the server cannot listen at the address.
    """
    config = replace(config, served_model_name=config.served_model_name or (engine.model,))
    events = engine.kv_events_config
    if events.host is None and config.uds is None:
        engine = replace(engine, kv_events_config=replace(events, host=config.host))
    with contextlib.closing(Readers.fork(Texts(engine, config))) as readers, listen(config) as listener:
        yield ApiServer(engine, config, listener, readers)


class ApiServer:
    """One engine and the HTTP server in front of it. Call `run` once. `ready` is set when requests can be answered."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, listener: socket.socket, readers: Readers) -> None:
        self._config = config
        self._listener = listener
        self._metrics = Metrics(config.metrics_prefix, config.served_model_name[0])
        self._engine = AsyncEngine(engine, self._metrics)
        self._readers = readers
        self._service = Service(self._engine, readers, config, self._metrics)
        self.ready = asyncio.Event()
        self._num_signals = 0

    @property
    def url(self) -> str:
        return url(self._config, self._listener)

    async def run(self) -> int:
        http = _Uvicorn(self._service, tls_context(self._config))
        serving = asyncio.create_task(http.serve([self._listener]))
        living = asyncio.create_task(self._live())
        reporting: list[asyncio.Task[None]] = []
        if not self._config.disable_log_stats:
            load = log_load(self._engine, self._metrics, self._config.log_interval_s)
            reporting.append(asyncio.create_task(load))
        self._handle_signals(living)
        try:
            await asyncio.wait((living, serving), return_when=asyncio.FIRST_COMPLETED)
            exit_code = await self._end(living, serving)
        finally:
            self._service.closing = True
            for task in (living, *reporting):
                task.cancel()
            self._readers.close()
            await self._engine.close()
            await self._service.close()
            http.should_exit = True
            await asyncio.gather(serving, living, *reporting, return_exceptions=True)
        LOGGER.info("stopped")
        return exit_code

    async def _live(self) -> ForkpointError:
        """Load the model, serve it until another process has ended, and return the reason. Signals cancel this.

        Raises the errors of loading the model.
        """
        await self._engine.start(self._writer())
        inputs = self._engine.inputs
        self._readers.begin(Facts(inputs.vocab_size, inputs.max_model_len, inputs.eos_token_ids))
        gc.collect()
        gc.freeze()  # otherwise a full collection would hold up all streams while it examines all imported objects
        LOGGER.info("ready: %s on %s (chat page at /, API under /v1)", self._config.served_model_name[0], self.url)
        self.ready.set()
        ends = [asyncio.create_task(self._engine.ended()), asyncio.create_task(self._readers.lost())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def _end(self, living: asyncio.Task[ForkpointError], serving: asyncio.Task[None]) -> int:
        """Drain the server if it is ready, and return the exit code. Raises the error of loading the model.

        Call this when `living` or `serving` has ended.
        """
        if living.done() and not living.cancelled():
            LOGGER.error("%s; open requests have failed and the server ends", living.result())
            await asyncio.sleep(LAST_ANSWERS_S)
            return FAILED
        if serving.done():
            serving.result()
            raise EngineStoppedError("the HTTP server ended by itself")
        if self.ready.is_set():
            await self._drain()
        else:
            LOGGER.info("stopped while the model was loading")
        return OK

    async def _writer(self) -> tuple[Tokenizer | None, frozenset[int]]:
        loaded = await self._readers.loaded()
        self._service.media = loaded.media
        if loaded.tokenizer is None:
            return None, loaded.eos_token_ids
        return Tokenizer.writer(loaded.tokenizer), loaded.eos_token_ids

    async def _drain(self) -> None:
        """Refuse new requests, and wait until open requests have ended or `shutdown_timeout_s` is over."""
        self._service.closing = True
        limit = self._config.shutdown_timeout_s
        if self._service.num_open:
            still_open = counted(self._service.num_open, "open request")
            LOGGER.info("stopping: %s may take %g s to end; Ctrl-C again ends the server at once", still_open, limit)
        deadline = time.monotonic() + limit
        while self._service.num_open and time.monotonic() < deadline and self._num_signals < 2:
            await asyncio.sleep(0.05)
        if self._service.num_open:
            LOGGER.warning("stopping: %s cut off", counted(self._service.num_open, "open request"))

    def _handle_signals(self, living: asyncio.Task[ForkpointError]) -> None:
        def stop() -> None:
            self._num_signals += 1
            living.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)


async def log_load(engine: AsyncEngine, metrics: Metrics, interval_s: float) -> None:
    """Log the load of a ready engine every `interval_s` seconds, or that the engine does not answer."""
    before: Reading | None = None
    while True:
        await asyncio.sleep(interval_s)
        if not engine.is_ready:
            continue
        try:
            stats = await engine.call("stats")
        except EngineStoppedError as error:
            if engine.is_ready:  # otherwise another line says why it has ended
                LOGGER.warning("%s; a step takes long, or it hangs", error)
            continue
        now = Reading(time.perf_counter(), metrics.num_prompt_tokens, metrics.num_output_tokens, stats)
        if before is not None:
            level = logging.INFO
            if is_idle(before, now):
                level = logging.DEBUG
            LOGGER.log(level, load_line(before, now))
        before = now


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's is worth a log line.

    uvicorn reports connections that are open when the server ends. `ApiServer` has already waited for their requests,
    and logged those that it cut off.
    """
    return "timeout graceful shutdown exceeded" not in str(record.msg)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `ApiServer` decides when to end."""

    def __init__(self, service: Service, tls: ssl.SSLContext | None) -> None:
        refused = partial(service.metrics.http_answer, "none", "other")
        connections = Connections(max(1, raise_file_limit() - RESERVED_FILES), refused)
        http: Any = partial(Connection, shared=connections)
        if tls is not None:
            http = partial(Handshake, shared=connections, context=tls)
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                log_level=service.config.uvicorn_log_level,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
                http=http,
                ws="none",
            )
        )
        logger = logging.getLogger("uvicorn")  # its lines go to forkpoint's own log
        logger.handlers, logger.propagate = list(LOGGER.handlers), False
        logging.getLogger("uvicorn.error").addFilter(_is_news)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

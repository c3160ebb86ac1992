"""Readers: processes that parse, check, render and tokenise requests.

`Readers.run(prepare, data)` makes a reader call `prepare(texts, data)`. The function is pickled by its name. `run`
returns its result or raises the error to answer with. If the caller is cancelled or a time limit passes, the reader is
killed in the middle of its work, and another one is forked within milliseconds. Requests are sorted into lanes by
size. Each lane has readers of its own, so small requests never wait for large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from forkpoint.errors import EngineStoppedError, ForkpointError, RequestFailedError
from forkpoint.server.body import Parts
from forkpoint.server.lanes import Lane
from forkpoint.server.reader_answers import receive_answer
from forkpoint.server.reader_process import HEAD, IS_USABLE, EndReader, Failed, StartReader, fork_loader
from forkpoint.server.texts import Facts, LoadedTexts, Prepare, Texts

SMALL_BYTES: Final = 64 * 2**10  # requests of at most this size use the lane with the highest priority
LARGE_BYTES: Final = 2**20  # larger requests have a lane of their own
NICENESS: Final = 10  # readers of medium and large requests must not slow the engine's steps
SMALL_NICENESS: Final = 5  # small requests take little time, so they may go before the others
PIECE_BYTES: Final = 2**20  # written at a time, so that the event loop does other things while a reader catches up
BUFFER_BYTES: Final = 2**20  # asyncio's read buffer; the default of 64 KiB would slow large answers

T = TypeVar("T")


@dataclass(slots=True)
class _Reader:
    """A reader process, as the API process sees it."""

    number: int
    inbox: asyncio.StreamReader
    outbox: asyncio.StreamWriter

    @property
    def is_lost(self) -> bool:
        """Whether an idle reader has died. Its socket shows that before the event loop has noticed."""
        if self.outbox.is_closing():
            return True
        events = select.poll()
        events.register(self.outbox.get_extra_info("socket"), select.POLLIN)  # an idle reader sends nothing
        return bool(events.poll(0))

    async def ask(self, function: bytes, parts: Parts) -> tuple[Any, bool]:
        """Return the answer, and whether the reader may be used again.

        Raises IncompleteReadError or OSError if the reader dies before it has answered.
        """
        await self._send(HEAD.pack(len(function), sum(map(len, parts))) + function)
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                await self._send(memoryview(part)[start : start + PIECE_BYTES])
        (is_usable,) = IS_USABLE.unpack(await self.inbox.readexactly(IS_USABLE.size))
        answer = await receive_answer(self.inbox)
        with contextlib.suppress(OSError):
            await self._send(HEAD.pack(0, 0))  # the answer's shared memory is open here, so the reader may close it
        return answer, is_usable

    async def _send(self, data: bytes | memoryview) -> None:
        if self.outbox.is_closing():  # the reader has died; uvloop would raise RuntimeError
            raise ConnectionResetError
        self.outbox.write(data)
        await self.outbox.drain()


class Readers:
    """The API process's side of the readers. All methods but `fork` belong to one event loop."""

    def __init__(self, channel: Connection, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._numbers = itertools.count()
        width = max(2, (os.cpu_count() or 2) // 2)
        self._small, self._medium, self._large = (
            Lane(niceness, width) for niceness in (SMALL_NICENESS, NICENESS, NICENESS)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[LoadedTexts] | None = None
        self._is_loading = True
        self._lost = asyncio.Event()
        self._closed = False
        self.num_open = 0  # requests whose body is being received, waits for a reader, or is being read

    @classmethod
    def fork(cls, texts: Texts) -> Readers:
        """Fork the loader, which begins to load. Call this before the process has threads."""
        ours, theirs = Pipe()
        pid = fork_loader(texts, theirs, ours)
        theirs.close()
        return cls(ours, pid)

    async def loaded(self) -> LoadedTexts:
        """Return the result of `Texts.load` once the loader has it, or raise its error. Call this once."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._loop.add_reader(self._channel.fileno(), self._receive)
        os.set_blocking(self._channel.fileno(), True)  # uvloop made it non-blocking; messages are sent as a whole
        return await self._loaded

    def begin(self, facts: Facts) -> None:
        """Send the engine's sizes to the loader, after `loaded`. Requests can be read from now on."""
        self._channel.send(facts)

    async def lost(self) -> ForkpointError:
        """Wait until readers can no longer be started, and return the reason."""
        await self._lost.wait()
        return EngineStoppedError("the process that starts readers has ended; was it killed?")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request in `num_open` until the context is left."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def run(self, prepare: Prepare[T], *parts: bytes | bytearray, lane: Lane | None = None) -> T:
        """Run `prepare` on the joined `parts` in a reader and return the result, by default in the lane of their size.

        Raises the errors of `prepare` and `Lane.turn`, RequestFailedError if the reader dies of the request, and
        EngineStoppedError if none can be started any more.
        """
        num_bytes = sum(map(len, parts))
        lane = lane or self._lane(num_bytes)
        async with lane.turn(num_bytes):
            answer = await self._run(lane, pickle.dumps(prepare), parts)
        del parts  # the error's traceback would keep them
        if isinstance(answer, Failed):
            raise answer.error
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kill all readers and the loader, even in the middle of their work. Does nothing when called again."""
        if self._closed:
            return
        self._closed = True
        if self._is_loading:
            os.kill(self._pid, signal.SIGKILL)  # it has no readers yet, and does not look at the channel while loading
        self._unwatch()
        self._channel.close()
        os.waitpid(self._pid, 0)

    def _lane(self, num_bytes: int) -> Lane:
        if num_bytes <= SMALL_BYTES:
            return self._small
        return self._medium if num_bytes < LARGE_BYTES else self._large

    async def _run(self, lane: Lane, function: bytes, parts: Parts) -> Any:
        while lane.idle and lane.idle[-1].is_lost:  # the system killed the reader while it was idle
            self._end(lane.idle.pop())
        reader = lane.idle.pop() if lane.idle else await self._start(lane)
        keep = False
        try:
            answer, keep = await reader.ask(function, parts)
            return answer
        except (asyncio.IncompleteReadError, OSError):
            self._check_open()
            raise RequestFailedError(
                "the process that read the request has died, perhaps because the system ran out of memory; send less"
            ) from None
        finally:
            if keep:
                lane.idle.append(reader)
            else:
                self._end(reader)

    async def _start(self, lane: Lane) -> _Reader:
        self._check_open()
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs:
                self._channel.send(StartReader(number, lane.niceness))
                reduction.send_handle(self._channel, theirs.fileno(), self._pid)
            inbox, outbox = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
        except BaseException:
            ours.close()
            self._send_end(number)
            raise
        return _Reader(number, inbox, outbox)

    def _check_open(self) -> None:
        if self._closed or self._lost.is_set():
            raise EngineStoppedError("the server is shutting down")

    def _end(self, reader: _Reader) -> None:
        reader.outbox.transport.abort()
        self._send_end(reader.number)

    def _send_end(self, number: int) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):  # the loader has ended, and its readers with it
                self._channel.send(EndReader(number))

    def _receive(self) -> None:
        assert self._loaded is not None
        try:
            loaded = self._channel.recv()
        except (EOFError, OSError):
            self._unwatch()
            self._lost.set()
            if not self._loaded.done():
                self._loaded.set_exception(EngineStoppedError("the process that loads the tokenizer has been killed"))
            return
        self._is_loading = False
        if self._loaded.done():
            return  # nobody waits any more
        if isinstance(loaded, Failed):
            self._loaded.set_exception(loaded.error)
        else:
            self._loaded.set_result(loaded)

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel.fileno())

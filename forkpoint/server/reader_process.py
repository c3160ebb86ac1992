"""Processes that read requests: one loads what reading takes, and forks a reader whenever one is wanted.

The loader is forked from the API process before that has threads, and never sees a request. A reader is a fork of it:
there within milliseconds, everything loaded, its memory shared, and free to be killed in the middle of its work.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

from forkpoint.errors import EngineStoppedError, ForkpointError, RequestFailedError
from forkpoint.obs.logs import LOGGER
from forkpoint.worker.child import HANDLED_SIGNALS, signals_blocked

HEAD: Final = struct.Struct("!QQ")  # bytes of the pickled function, bytes of the data
LENGTH: Final = struct.Struct("!Q")  # bytes of the pickled answer
MAX_GROWTH_BYTES: Final = 4 * 2**30  # of a reader's own memory, beyond which its request fails
MAX_STACK_BYTES: Final = 4 * 2**20  # half of what the engine's threads have: what passes here does not overflow there
FIRST_TO_GO: Final = "1000"  # for the system that runs out of memory: a reader, rather than the engine


class Knowledge(Protocol):
    """What readers know. `load` runs once, in the loader; `begin` once the engine has told its limits."""

    def load(self) -> object:
        """What the API process is to be told. Raises ForkpointError."""

    def begin(self, facts: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Begin:
    facts: object


@dataclass(frozen=True, slots=True)
class StartReader:
    """The socket of the reader follows."""

    number: int
    niceness: int


@dataclass(frozen=True, slots=True)
class EndReader:
    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


def fork_loader(knowledge: Knowledge, channel: Connection, others: Connection) -> int:
    """Start the loader and return its process id. `others` is the API process's end of the channel."""
    with signals_blocked():  # they are for the API process, from this one's first moment on
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)  # of an event loop that stays behind
            for number in HANDLED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    if pid:
        return pid
    try:
        others.close()
        _load_and_fork(knowledge, channel)
    except BaseException:
        LOGGER.exception("the process that starts readers stops")
    finally:
        os._exit(0)  # the API process sees its end closed, and asks for no exit code


def _load_and_fork(knowledge: Knowledge, channel: Connection) -> None:
    readers: dict[int, int] = {}
    try:
        told = _load(knowledge)
        channel.send(told)
        while not isinstance(told, Failed):
            match channel.recv():
                case Begin(facts):
                    knowledge.begin(facts)
                    gc.collect()
                    gc.freeze()  # else each reader's first collection would copy all shared memory
                case StartReader(number, niceness):
                    handle = reduction.recv_handle(channel)
                    with contextlib.suppress(OSError):  # too many processes: the API process sees its end closed
                        readers[number] = _fork_reader(knowledge, channel, handle, niceness)
                    os.close(handle)
                case EndReader(number):
                    _end(readers.pop(number, None))
    except (EOFError, OSError):  # the API process has ended
        for pid in readers.values():
            _end(pid)


def _load(knowledge: Knowledge) -> object:
    try:
        return knowledge.load()
    except Exception as error:
        return Failed(_sendable(error, EngineStoppedError))


def _end(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # it may have ended, but is not reaped before the next line
        os.waitpid(pid, 0)


def _fork_reader(knowledge: Knowledge, channel: Connection, handle: int, niceness: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        channel.close()
        os.nice(niceness)
        _bound_memory()
        with socket.socket(fileno=handle) as own:
            _read_requests(knowledge, own)
    finally:  # also where the API process has gone in the middle of an answer
        os._exit(0)


def _bound_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    with contextlib.suppress(OSError, ValueError, IndexError):
        now = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        for kind, wanted in ((resource.RLIMIT_STACK, MAX_STACK_BYTES), (resource.RLIMIT_DATA, now + MAX_GROWTH_BYTES)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (wanted if hard < 0 else min(wanted, hard), hard))


def _read_requests(knowledge: Knowledge, own: socket.socket) -> None:
    stream = own.makefile("rwb")
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        num_function_bytes, num_data_bytes = HEAD.unpack(head)
        function: Callable[[Knowledge, bytes], object] = pickle.loads(stream.read(num_function_bytes))
        answer = _answer(function, knowledge, stream.read(num_data_bytes))
        stream.write(LENGTH.pack(len(answer)) + answer)
        stream.flush()


def _answer(function: Callable[[Knowledge, bytes], object], knowledge: Knowledge, data: bytes) -> bytes:
    try:
        return pickle.dumps(function(knowledge, data), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps(Failed(_sendable(error, RequestFailedError)))


def _sendable(error: Exception, instead: type[ForkpointError]) -> Exception:
    """`error` where it survives the way, or else one of the kind `instead` that tells its class."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return instead(f"unexpected {type(error).__name__}: {error}")
    return error

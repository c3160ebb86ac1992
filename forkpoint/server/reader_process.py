"""The processes that read requests: a loader, which loads the tokenizer and the templates, and readers, its forks.

The loader is forked from the API process before that process has threads. It never sees a request. A reader starts
within milliseconds with everything loaded, shares the loader's memory, and may be killed in the middle of its work.
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
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from forkpoint.engine.bounded import bound_memory
from forkpoint.errors import EngineStoppedError, ForkpointError
from forkpoint.freed_memory import return_freed_memory
from forkpoint.obs.logs import LOGGER
from forkpoint.server.errors import HTTPError, to_http
from forkpoint.server.reader_answers import PackedAnswer
from forkpoint.server.texts import Facts, Prepare, Texts
from forkpoint.worker.child import HANDLED_SIGNALS, signals_blocked

# Number of bytes of the pickled function, and of the data. Zeros: the last answer has been received.
HEAD: Final = struct.Struct("!QQ")
IS_USABLE: Final = struct.Struct("!?")  # precedes an answer: whether the reader may be used again
RETIRE_BYTES: Final = 192 * 2**20  # a reader that has grown by more ends; the memo of images is a third of it
MAX_UNMEASURED_BYTES: Final = 2**20  # a larger request ends its reader if the reader's memory is not known
MAX_GROWTH_BYTES: Final = 4 * 2**30  # memory that a reader may allocate; its request fails beyond it
# Half of the engine threads' stack: a grammar that does not overflow a reader's stack does not overflow theirs.
MAX_STACK_BYTES: Final = 4 * 2**20
FIRST_TO_GO: Final = "1000"  # oom_score_adj: a system short of memory kills a reader rather than the engine


@dataclass(frozen=True, slots=True)
class StartReader:
    """Asks the loader to fork a reader. The handle of the reader's socket follows this message."""

    number: int
    niceness: int


@dataclass(frozen=True, slots=True)
class EndReader:
    """Asks the loader to kill a reader."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent in place of a result: the error to raise."""

    error: Exception


def fork_loader(texts: Texts, channel: Connection, others: Connection) -> int:
    """Fork the loader of `texts`, and return its process id. `others` is this process's end of the channel."""
    with signals_blocked():  # the loader must not act on a signal before it ignores them; only the API process does
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)  # it belongs to the API process's event loop
            for number in HANDLED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    if pid:
        return pid
    try:
        others.close()
        _load_and_fork(texts, channel)
    except BaseException:
        LOGGER.exception("the process that starts readers stops")
    finally:
        os._exit(0)  # the API process notices the closed channel and ignores the exit code


def _load_and_fork(texts: Texts, channel: Connection) -> None:
    readers: dict[int, int] = {}
    try:
        loaded = _load(texts)
        channel.send(loaded)
        while not isinstance(loaded, Failed):
            match channel.recv():
                case Facts() as facts:
                    texts.begin(facts)
                    gc.collect()
                    return_freed_memory()  # what readers inherit would hide their own growth
                    gc.freeze()  # without it each reader's first collection would copy all shared memory
                case StartReader(number, niceness):
                    handle = reduction.recv_handle(channel)
                    with contextlib.suppress(OSError):  # too many processes; the API process sees its socket closed
                        readers[number] = _fork_reader(texts, channel, handle, niceness)
                    os.close(handle)
                case EndReader(number):
                    _end(readers.pop(number, None))
    except (EOFError, OSError):  # the API process has ended
        for pid in readers.values():
            _end(pid)


def _load(texts: Texts) -> object:
    try:
        return texts.load()
    except (ForkpointError, OSError) as error:
        return Failed(error)
    except Exception as error:  # it may not be picklable
        return Failed(EngineStoppedError(f"unexpected {type(error).__name__}: {error}"))


def _end(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # safe even if the reader has ended, as only the next line reaps it
        os.waitpid(pid, 0)


def _fork_reader(texts: Texts, channel: Connection, handle: int, niceness: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        channel.close()
        os.nice(niceness)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
        bound_memory(MAX_GROWTH_BYTES, MAX_STACK_BYTES)
        with socket.socket(fileno=handle) as own:
            _read_requests(texts, own)
    finally:  # reached too if the API process ends in the middle of an answer
        os._exit(0)


def _private_bytes() -> int | None:
    """Return the memory of this process that no file backs, or None where the system does not say."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except (OSError, ValueError):
        return None
    return (resident - shared) * resource.getpagesize()


def _is_usable(started_with: int | None, num_data_bytes: int) -> bool:
    """Return whether a reader that had `started_with` bytes may be used again after a request of this size."""
    now = _private_bytes()
    if now is None or started_with is None:
        return num_data_bytes <= MAX_UNMEASURED_BYTES
    if now - started_with <= RETIRE_BYTES:
        return True
    return_freed_memory()  # that of decoded pictures, for example
    return (_private_bytes() or 0) - started_with <= RETIRE_BYTES


def _read_requests(texts: Texts, own: socket.socket) -> None:
    stream = own.makefile("rwb")
    answer, started_with = PackedAnswer(b""), _private_bytes()
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        num_function_bytes, num_data_bytes = HEAD.unpack(head)
        if not num_function_bytes:  # the API process has the answer
            answer.close()
            continue
        prepare: Prepare[object] = pickle.loads(stream.read(num_function_bytes))
        answer = _answer(prepare, texts, stream.read(num_data_bytes))
        stream.write(IS_USABLE.pack(_is_usable(started_with, num_data_bytes)))
        stream.write(answer.message)
        stream.flush()


def _answer(prepare: Prepare[object], texts: Texts, data: bytes) -> PackedAnswer:
    """Return the result of `prepare`, or a `Failed` with the error to answer with."""
    try:
        return PackedAnswer.of(prepare(texts, data))
    except RecursionError:
        error = HTTPError(400, "a value in the body is nested too deeply to be read; give it flatter")
    except MemoryError:
        error = HTTPError(400, "the request takes too much memory to read; send less")
    except Exception as raised:
        error = to_http(raised, "reading a request")
    return PackedAnswer.of(Failed(error))

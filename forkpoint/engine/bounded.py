"""Runs a function in a process of its own, with limits on time and memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

WALL_S: Final = 60.0  # limit for a process that neither computes nor ends, such as one that waits for a lock


class OverLimitError(Exception):
    """The function gave no answer within its limits of time and memory."""


def run_bounded(function: Callable[[], T], *, cpu_s: int, memory_bytes: int) -> T:
    """Call `function` in a fork of this process and return its result. It changes nothing in this process.

    The result and exceptions come back pickled. Raises what the function raises. Raises OverLimitError if the fork
    gives no answer: it needs more than `cpu_s` seconds of CPU time or `memory_bytes` of new memory, dies, or takes
    longer than WALL_S seconds.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _bound(cpu_s, memory_bytes)
            _answer(function, sender)
        finally:
            os._exit(0)  # whatever was raised: the parent's exit handlers and buffers are not for this process
    os.close(sender)
    try:
        with open(receiver, "rb") as stream:
            readable, _, _ = select.select([stream], [], [], WALL_S)
            answer = stream.read() if readable else b""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not answer:
        raise OverLimitError
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], sender: int) -> None:
    try:
        answer = pickle.dumps((function(), None))
    except MemoryError:
        return
    except Exception as error:
        answer = pickle.dumps((None, error))
    with open(sender, "wb") as stream:
        stream.write(answer)


def _bound(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process's CPU time, and its memory to `memory_bytes` more. CPU time that ran out kills it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with contextlib.suppress(OSError, ValueError, IndexError):  # systems without /proc get no memory limit
        used_bytes = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = used_bytes + memory_bytes
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))

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
            # CPU time that ran out kills the process.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            bound_memory(memory_bytes)
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


def bound_memory(num_more_bytes: int, stack_bytes: int | None = None) -> None:
    """Limit this process's memory to `num_more_bytes` more than it has, and its stack to `stack_bytes` if given."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # systems without /proc get no limit
        num_bytes = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        limits = {resource.RLIMIT_DATA: num_bytes + num_more_bytes}
        if stack_bytes is not None:
            limits[resource.RLIMIT_STACK] = stack_bytes
        for kind, wanted in limits.items():
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))

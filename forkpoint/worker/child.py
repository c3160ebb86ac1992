"""Child processes: they leave signals to their parent, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

EXIT_FAILED = 1
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the parent handles them and ends its children
UNGUARDED = (
    "error: a process of this program imports the program's file, which starts such processes again; put what the file "
    'does under `if __name__ == "__main__":`'
)


def start_child(target: Callable[..., None], *arguments: Any, name: str) -> SpawnProcess:
    """Spawn a process that runs `target(*arguments)`, which has to call `begin_child` first.

    SystemExit with an explanation if the program's main module starts processes when it is imported.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name)
    resource_tracker.ensure_running()  # otherwise `start` does it, which unblocks the signals again
    with signals_blocked():  # the child inherits the mask, so that no signal reaches it before `begin_child`
        try:
            process.start()
        except RuntimeError:
            if "__mp_main__" not in sys.modules:  # a spawned process has the program's main module under that name
                raise
            raise SystemExit(UNGUARDED) from None
    return process


def begin_child() -> None:
    """Ignore the signals that the parent handles, and end this process as soon as the parent ends."""
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextmanager
def signals_blocked() -> Iterator[None]:
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def how_it_ended(exit_code: int | None) -> str:
    """Return the words of an error message about a child that has ended, with its exit code or signal."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}; its last lines in the log say why"
    name = signal.Signals(-exit_code).name
    hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"

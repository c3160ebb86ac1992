"""Handles Ctrl-C between steps, so that no step is interrupted in the middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """A context in which the first Ctrl-C sets `requested` and only a second one raises KeyboardInterrupt.

    With `at_once` the first one raises too. It does nothing outside the main thread, where signals cannot be handled.
    With `at_once` it also does nothing if the program handles Ctrl-C itself.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.requested = False
        self._at_once = at_once
        self._previous: Any = None

    def __enter__(self) -> DeferredInterrupt:
        ours = not self._at_once or signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._at_once:
            raise KeyboardInterrupt

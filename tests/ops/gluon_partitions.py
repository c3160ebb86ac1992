"""Partitions of a program on the host: threads of which one runs at a time, which take turns where they wait."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Stopped(BaseException):
    """Ends a partition after another one has failed."""


class Partition:
    """A thread that runs one function as `num_threads` threads of a device do, its products that are not computed yet,
    and its copies that have not landed."""

    def __init__(self, function: Callable[[], None] | None = None, num_threads: int = 128) -> None:
        self.function, self.num_threads = function, num_threads
        self.products: list[Any] = []
        self.copies: list[Callable[[], None]] = []
        self.ready: Callable[[], bool] = lambda: True
        self.done = False
        self.is_last = False  # lets copies land and all others run first
        self.may_run = threading.Event()


class Partitions:
    """Takes turns among partitions in random order. Copies land at random, too."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance
        self.copies: list[Callable[[], None]] = []
        self.running = Partition()
        self.others: list[Partition] = []  # that have not ended and do not run
        self.error: BaseException | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let copies land and other partitions run, until `ready`."""
        own = self.running
        own.ready = ready
        self._give_way(own)
        own.ready = lambda: True

    def pause(self) -> None:
        """Let copies land and other partitions run, half the time until only this partition can go on."""
        own = self.running
        if own.function is not None:
            own.is_last = self.random.random() < 0.5
            self._give_way(own)
            own.is_last = False

    def run(self, functions: Sequence[Callable[[], None]], num_threads: Sequence[int]) -> None:
        """Run the functions in partitions of their own until all have ended."""
        main = self.running
        parts = [Partition(function, count) for function, count in zip(functions, num_threads, strict=True)]
        main.ready = lambda: all(part.done for part in parts)
        self.others = list(parts)
        threads = [threading.Thread(target=self._work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        self._give_way(main)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _work(self, own: Partition) -> None:
        own.may_run.wait()
        try:
            if self.error is None:
                assert own.function is not None
                own.function()
                own.done = True
                self._next()
        except Stopped:
            pass
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        self.error = error
        for part in self.others:
            part.may_run.set()

    def _give_way(self, own: Partition) -> None:
        """Let others run until it is the turn of `own`, which is then ready."""
        own.may_run.clear()
        self.others.append(own)
        self._next()
        own.may_run.wait()
        if self.error is not None and own.function is not None:
            raise Stopped

    def _next(self) -> None:
        """Let a partition run that is ready, after copies that happen to land first."""
        while True:
            ready = [part for part in self.others if part.ready()]
            able = [part for part in ready if not part.is_last] or ([] if self.copies else ready)
            assert able or self.copies, "the program waits for ever"
            spot = self.random.randrange(len(able) + len(self.copies))
            if spot < len(able):
                break
            self.copies.pop(spot - len(able))()
        self.running = able[spot]
        self.others.remove(self.running)
        self.running.may_run.set()

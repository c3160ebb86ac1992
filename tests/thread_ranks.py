"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from forkpoint.ops.ranks import Ranks

WAIT_S = 60
T = TypeVar("T")


class Meeting:
    """The place where threads put their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[Tensor] = [torch.empty(0)] * size


class ThreadRanks(Ranks):
    """Adds up in the order of the ranks."""

    def __init__(self, rank: int, size: int, gathers: bool, meeting: Meeting) -> None:
        super().__init__(rank, size, gathers)
        self._meeting = meeting

    def sum(self, x: Tensor) -> Tensor:
        return self._stacked(x).sum(0)

    def _stacked(self, x: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.brought[self.rank] = x
        meeting.barrier.wait(WAIT_S)
        found = torch.stack(meeting.brought)
        meeting.barrier.wait(WAIT_S)
        return found


def on_each(size: int, gathers: bool, run: Callable[[Ranks], T]) -> list[T]:
    """What `run` answers on each rank; the first error that is not another rank's."""
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return run(ThreadRanks(rank, size, gathers, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]

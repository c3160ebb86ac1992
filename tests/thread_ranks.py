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

    def __init__(
        self, rank: int, size: int, gathers: bool, meeting: Meeting, context: ThreadRanks | None = None
    ) -> None:
        super().__init__(rank, size, gathers, context=context)
        self._meeting = meeting

    @classmethod
    def all_of(cls, size: int, gathers: bool, context_size: int = 1) -> list[ThreadRanks]:
        """Return the ranks, of which `context_size` neighbours keep tokens in turn."""
        meeting, found = Meeting(size), list[ThreadRanks]()
        groups = [Meeting(context_size) for _ in range(0, size, context_size)]
        for rank in range(size):
            context: ThreadRanks | None = None
            if context_size > 1:
                group, within = divmod(rank, context_size)
                context = cls(within, context_size, gathers, groups[group])
            found.append(cls(rank, size, gathers, meeting, context))
        return found

    def abort(self) -> None:
        """Let other ranks fail that wait for this one."""
        self._meeting.barrier.abort()
        if isinstance(self.context, ThreadRanks):
            self.context._meeting.barrier.abort()

    def sum(self, x: Tensor) -> Tensor:
        return self.stack(x).sum(0)

    def stack(self, x: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.brought[self.rank] = x
        meeting.barrier.wait(WAIT_S)
        found = torch.stack(meeting.brought)
        meeting.barrier.wait(WAIT_S)
        return found


def on_each(size: int, gathers: bool, run: Callable[[Ranks], T]) -> list[T]:
    """What `run` answers on each rank; the first error that is not another rank's."""

    def one(rank: ThreadRanks) -> T:
        try:
            return run(rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in ThreadRanks.all_of(size, gathers)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]

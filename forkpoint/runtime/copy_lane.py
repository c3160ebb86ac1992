"""Copies in one direction on a stream of the device, in batches that are issued and reported together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from forkpoint.platforms.platform import CopyStream, Mark
from forkpoint.runtime.stretch import Stretch, joined


@dataclass(slots=True)
class CopyBatch:
    """Copies that were issued together. Their tensors stay alive until `mark`, the point after the last copy.

    `filled` is the point at which the buffers of copies to the host have their contents.
    """

    tickets: list[int] = field(default_factory=list)
    checks: dict[int, Callable[[], bool]] = field(default_factory=dict)  # ticket -> whether its source was still there
    pages: set[int] = field(default_factory=set)
    copies: list[tuple[Stretch, Stretch]] = field(default_factory=list)  # target and source
    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same, as they were issued
    num_bytes: int = 0
    after: list[Mark] = field(default_factory=list)
    filled: Mark | None = None
    mark: Mark | None = None


class CopyLane:
    """One direction of copies: a stream, the batch under construction, and the batches that run."""

    def __init__(self, stream: CopyStream, padding: int = 0) -> None:
        """Copies of neighbours also copy the `padding` between them."""
        self.stream = stream
        self._padding = padding
        self.next = CopyBatch()
        self._running: deque[CopyBatch] = deque()
        self._last: dict[int, CopyBatch] = {}  # page of the host -> the last batch that uses it

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def add(self, target: Stretch, source: Stretch, page: int | None = None, ticket: int = 0) -> CopyBatch:
        """Add a copy, of a page of the host tier if one is given, and return its batch."""
        self.next.copies.append((target, source))
        self.next.num_bytes += source.num_bytes
        if page is not None:
            self.next.pages.add(page)
        if ticket:
            self.next.tickets.append(ticket)
        return self.next

    def issue(self, other: CopyLane) -> CopyBatch:
        """Issue the batch under construction. It waits for the other lane's copies of its pages."""
        batch, self.next = self.next, CopyBatch()
        marks = {id(each): each for page in batch.pages if (each := other.mark_of(page)) is not None}
        for mark in (*batch.after, *marks.values()):
            self.stream.wait_for(mark)
        batch.tensors = [(target.bytes, source.bytes) for target, source in joined(batch.copies, self._padding)]
        self.stream.copy(batch.tensors)
        batch.mark = self.stream.mark()
        self._running.append(batch)
        self._last.update(dict.fromkeys(batch.pages, batch))
        return batch

    def mark_of(self, page: int) -> Mark | None:
        """Return the mark after the last copy to or from a page; None if there is none in flight."""
        batch = self._last.get(page)
        return None if batch is None else batch.mark

    def take_done(self) -> tuple[list[int], list[int]]:
        """Return the tickets of copies that have ended since the last call, and of those whose source was lost."""
        done, lost = list[int](), list[int]()
        while self._running and (mark := self._running[0].mark) is not None and mark.query():
            batch = self._running.popleft()
            for ticket in batch.tickets:
                check = batch.checks.get(ticket)
                (done if check is None or check() else lost).append(ticket)
            for page in batch.pages:
                if self._last[page] is batch:
                    del self._last[page]
        return done, lost

"""Copies in one direction on a stream of the device, in batches that are issued and reported together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from forkpoint.platforms.platform import CopyStream, DeviceEvent
from forkpoint.runtime.stretch import Stretch, joined


@dataclass(slots=True)
class CopyBatch:
    """Copies that were issued together. Their tensors stay alive until `event`, the point after the last copy.

    `filled` is the point at which the buffers of copies to the host have their contents.
    """

    tickets: list[int] = field(default_factory=list)
    checks: dict[int, Callable[[], bool]] = field(default_factory=dict)  # ticket -> whether its source was still there
    pages: set[int] = field(default_factory=set)
    copies: list[tuple[Stretch, Stretch]] = field(default_factory=list)  # target and source
    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same, as they were issued
    num_bytes: int = 0
    after: list[DeviceEvent] = field(default_factory=list)
    filled: DeviceEvent | None = None
    event: DeviceEvent | None = None


class CopyLane:
    """One direction of copies: a stream, the batch under construction, and the batches that run."""

    def __init__(self, stream: CopyStream, padding: int) -> None:
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
        events = {id(each): each for page in batch.pages if (each := other.event_of(page)) is not None}
        for event in (*batch.after, *events.values()):
            self.stream.wait_for(event)
        batch.tensors = [(target.bytes, source.bytes) for target, source in joined(batch.copies, self._padding)]
        self.stream.copy(batch.tensors)
        batch.event = self.stream.record_event()
        self._running.append(batch)
        self._last.update(dict.fromkeys(batch.pages, batch))
        return batch

    def event_of(self, page: int) -> DeviceEvent | None:
        """Return the event after the last copy to or from a page; None if there is none in flight."""
        batch = self._last.get(page)
        return None if batch is None else batch.event

    def take_done(self) -> tuple[list[int], list[int]]:
        """Return the tickets of copies that have ended since the last call, and of those whose source was lost."""
        done, lost = list[int](), list[int]()
        while self._running and (event := self._running[0].event) is not None and event.query():
            batch = self._running.popleft()
            for ticket in batch.tickets:
                check = batch.checks.get(ticket)
                (done if check is None or check() else lost).append(ticket)
            for page in batch.pages:
                if self._last[page] is batch:
                    del self._last[page]
        return done, lost

"""Lanes decide which request a reader reads next, and how long a request may keep a reader while others wait."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from forkpoint.errors import QueueFullError, RequestTooLargeError

TIMEOUT_S: Final = 60.0  # limit for reading one request; a million tokens of text take a few seconds
TURN_S: Final = 2.0  # length of a turn; a request that is still being read then makes room for another
MAX_WAIT_S: Final = 10.0  # limit for the wait for a turn; most clients send a refused request again


@dataclass(slots=True, eq=False)
class _Place:
    """One request that is being read. Rescheduling `limit` to now ends the reading."""

    limit: asyncio.Timeout
    is_displaced: bool = False


@dataclass(slots=True)
class Lane:
    """The queue of requests of one kind. At most `width` have a turn at once; the smallest waiting request is next.

    A turn lasts `turn_s`. A request that takes longer moves to one of the places for slow requests; there are half as
    many places as turns. If all places are taken, the request keeps its turn until another request wants it, and is
    then refused. No request is read for longer than `timeout_s`. `niceness` is its readers'.
    """

    niceness: int
    width: int
    timeout_s: float = TIMEOUT_S
    turn_s: float = TURN_S
    idle: list[Any] = field(default_factory=list)  # readers without a request
    _num_free: int = field(init=False)  # free turns
    waiting: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)  # the smallest request first
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _slow: set[_Place] = field(default_factory=set)
    _overdue: dict[_Place, None] = field(default_factory=dict)  # have kept their turn too long; the oldest first

    def __post_init__(self) -> None:
        self._num_free = self.width

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn and hold it, or a place for slow requests, until the context is left.

        `num_bytes` is the size by which requests wait. Raises QueueFullError if no turn comes in time or another
        request needs the turn, and RequestTooLargeError after `timeout_s`.
        """
        await self._wait(num_bytes)
        place = _Place(asyncio.timeout(self.timeout_s))
        timer = asyncio.get_running_loop().call_later(self.turn_s, self._end_turn, place)
        try:
            async with place.limit:
                yield
        except TimeoutError:
            if place.is_displaced:
                raise QueueFullError(
                    f"the request took longer than {self.turn_s:g} s to read while others waited; try again later, "
                    "or send less"
                ) from None
            if place.limit.expired():
                raise RequestTooLargeError(
                    f"the request took longer than {self.timeout_s:g} s to read; send less"
                ) from None
            raise
        finally:
            timer.cancel()
            self._leave(place)

    async def _wait(self, num_bytes: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (num_bytes, next(self._numbers), granted)
        insort(self.waiting, entry)
        self._displace()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await granted
        except BaseException as error:
            if entry in self.waiting:
                self.waiting.remove(entry)
            elif granted.done() and not granted.cancelled():
                self._free_turn()
            if isinstance(error, TimeoutError):
                raise QueueFullError(
                    f"too many requests are being read: this one waited {MAX_WAIT_S:g} s; try again later"
                ) from None
            raise

    def _end_turn(self, place: _Place) -> None:
        if len(self._slow) < max(1, self.width // 2):
            self._slow.add(place)
            self._free_turn()
        else:
            self._overdue[place] = None
            self._displace()

    def _displace(self) -> None:
        """Refuse the oldest overdue request if another request waits."""
        if self.waiting and self._overdue:
            place = next(iter(self._overdue))
            del self._overdue[place]
            place.is_displaced = True
            place.limit.reschedule(asyncio.get_running_loop().time())

    def _leave(self, place: _Place) -> None:
        if place not in self._slow:
            self._overdue.pop(place, None)
            self._free_turn()
            return
        self._slow.remove(place)
        if self._overdue:
            oldest = next(iter(self._overdue))
            del self._overdue[oldest]
            self._end_turn(oldest)

    def _free_turn(self) -> None:
        self._num_free += 1
        while self._num_free and self.waiting:
            granted = self.waiting.pop(0)[2]
            if not granted.done():  # it is done if the client has just left
                granted.set_result(None)
                self._num_free -= 1

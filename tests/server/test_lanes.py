"""Lanes: the smallest request is next, slow ones make room, and no turn is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from forkpoint.errors import ForkpointError, QueueFullError, RequestTooLargeError
from forkpoint.server import lanes
from forkpoint.server.lanes import Lane


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def read(lane: Lane, num_bytes: int, until: asyncio.Event, order: list[int]) -> None:
    async with lane.turn(num_bytes):
        order.append(num_bytes)
        await until.wait()


async def settled() -> None:
    """Let all tasks go on until each waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def start(*works: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(work) for work in works]


@pytest.mark.anyio
async def test_the_smallest_request_is_next() -> None:
    lane, first, rest, order = Lane(0, 1), asyncio.Event(), asyncio.Event(), list[int]()
    rest.set()
    tasks = start(read(lane, 50, first, order), *(read(lane, size, rest, order) for size in (400, 90, 400, 1)))
    await settled()
    assert order == [50] and len(lane.waiting) == 4
    first.set()
    await asyncio.gather(*tasks)
    assert order == [50, 1, 90, 400, 400]


@pytest.mark.anyio
async def test_slow_requests_make_room_and_only_as_many_as_needed_are_refused() -> None:
    """A lane of two gets four endless requests. One goes on as a slow one, and each new request takes a turn."""
    lane, never, at_once, order = Lane(0, 2, turn_s=0.05), asyncio.Event(), asyncio.Event(), list[int]()
    at_once.set()
    endless = start(*(read(lane, 10, never, order) for _ in range(4)))
    for number in range(6):
        async with asyncio.timeout(20):
            await read(lane, 1000 + number, at_once, order)
    await asyncio.sleep(0.1)
    refused = [task for task in endless if task.done()]
    assert len(refused) < 4 and all(isinstance(task.exception(), QueueFullError) for task in refused)
    assert any("longer than 0.05 s to read while others waited" in str(task.exception()) for task in refused)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    async with lane.turn(1), lane.turn(1):
        pass


@pytest.mark.anyio
async def test_a_slow_request_alone_goes_on_to_its_end() -> None:
    lane, order, ends = Lane(0, 1, turn_s=0.01), list[int](), [asyncio.Event() for _ in range(2)]
    tasks = start(*(read(lane, number, end, order) for number, end in enumerate(ends)))
    while len(order) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # both are beyond their turn: one in the place for slow ones, one for want of others
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)


@pytest.mark.anyio
async def test_waiting_and_reading_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAIT_S", 0.02)
    lane, never, order = Lane(0, 1, timeout_s=0.1, turn_s=60), asyncio.Event(), list[int]()
    reading, waiting = start(read(lane, 1, never, order), read(lane, 2, never, order))
    with pytest.raises(QueueFullError, match=r"waited 0\.02 s; try again later"):
        await waiting
    with pytest.raises(RequestTooLargeError, match=r"longer than 0\.1 s to read; send less"):
        await reading
    assert not lane.waiting


@pytest.mark.anyio
async def test_an_error_of_the_reading_itself_is_passed_on() -> None:
    lane = Lane(0, 1)
    with pytest.raises(TimeoutError, match="own"):
        async with lane.turn(1):
            raise TimeoutError("own")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.anyio
async def test_no_turn_is_lost_and_no_more_are_given_than_there_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of random sizes and lengths, a third of whose clients leave at a random moment."""
    monkeypatch.setattr(lanes, "MAX_WAIT_S", 0.02)
    rng, num_reading, most = random.Random(seed), 0, 0
    lane = Lane(0, 4, timeout_s=0.02, turn_s=0.003)

    async def one() -> None:
        nonlocal num_reading, most
        await asyncio.sleep(rng.random() * 0.1)
        with suppress(ForkpointError):
            async with lane.turn(rng.randrange(5)):
                num_reading += 1
                most = max(most, num_reading)
                try:
                    await asyncio.sleep(rng.random() * rng.choice((0.002, 0.03)))
                finally:
                    num_reading -= 1

    tasks = start(*(one() for _ in range(300)))
    for task in rng.sample(tasks, 100):
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 4 < most <= 6 and num_reading == 0 and not lane.waiting
    async with asyncio.timeout(1), lane.turn(1), lane.turn(1), lane.turn(1), lane.turn(1):
        pass

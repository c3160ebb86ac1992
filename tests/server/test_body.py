"""Bodies: their parsing takes a time in proportion to their size, and the largest give way where memory is short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from forkpoint.server.body import Bodies, parse
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.completions.body import CompletionBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.messages.body import MessagesBody


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def many(form: str) -> Callable[[int], bytes]:
    """Return a function from a number to a body with so many fields."""
    return lambda num: f"{{{','.join(form % i for i in range(num))}}}".encode()


def in_list(before: str, element: str, after: str) -> Callable[[int], bytes]:
    return lambda num: f"{before}{','.join([element] * num)}{after}".encode()


BODIES: dict[str, tuple[Any, Callable[[int], bytes]]] = {
    "unknown fields": (CompletionBody, many('"k%d":1')),
    "unknown fields of a message": (ChatBody, lambda num: b'{"messages":[' + many('"k%d":1')(num) + b"]}"),
    "escapes": (MessagesBody, many('"k%d":"\\u00e9"')),
    "choices": (CompletionBody, in_list('{"prompt":"x","guided_choice":[', "1", "]}")),
    "tool choices": (ChatBody, in_list('{"messages":[],"tool_choice":{"mode":"auto","tools":[', "1", "]}}")),
    "a value of a wrong kind": (CompletionBody, in_list('{"prompt":{"a":[', "1", "]}}")),
    "one key again and again": (CompletionBody, in_list("{", '"temperature":1', "}")),
}


@pytest.mark.parametrize("name", BODIES)
def test_parsing_takes_linear_time(name: str) -> None:
    """A body with eight times as many parts takes less than 30 times as long; it was 64 times."""
    model, made = BODIES[name]

    def seconds(data: bytes) -> float:
        started = time.process_time()
        with pytest.raises(HTTPError):
            parse(model, data)
        return time.process_time() - started

    few, lots = made(4000), made(32000)
    assert min(seconds(lots) for _ in range(3)) < 30 * max(0.001, min(seconds(few) for _ in range(3)))


class Client:
    """Sends a body piece by piece."""

    def __init__(self, bodies: Bodies) -> None:
        self._pieces = asyncio.Queue[dict[str, Any]]()
        self._answered = asyncio.Event()
        headers = [(b"content-type", b"application/json")]
        self._request = Request({"type": "http", "headers": headers}, self._pieces.get)
        self.task = asyncio.create_task(self._run(bodies))

    async def _run(self, bodies: Bodies) -> int:
        async with bodies.read(self._request) as data:
            await self._answered.wait()
            return sum(map(len, data))

    async def send(self, num_bytes: int, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": b" " * num_bytes, "more_body": more})
        for _ in range(10):
            await asyncio.sleep(0)

    async def answer(self) -> int:
        self._answered.set()
        return await self.task


@pytest.mark.anyio
async def test_the_largest_body_gives_way() -> None:
    """Whoever holds all memory, by sending much or slowly, is refused once others send less."""
    bodies = Bodies(2, 100)
    slow, whole, small = Client(bodies), Client(bodies), Client(bodies)
    await slow.send(99)
    await whole.send(98, more=False)
    await small.send(10, more=False)
    with pytest.raises(HTTPError, match="too much is being sent at once; try again later"):
        await slow.task
    late = Client(bodies)
    await late.send(92)
    await late.send(8, more=False)
    with pytest.raises(HTTPError, match="too much is being sent"):
        await late.task
    assert [await whole.answer(), await small.answer()] == [98, 10]
    again = [Client(bodies) for _ in range(2)]  # all of the memory is free
    for client in again:
        await client.send(100, more=False)
    assert [await client.answer() for client in again] == [100, 100]


@pytest.mark.anyio
async def test_a_body_that_is_too_large_frees_its_memory() -> None:
    bodies = Bodies(1, 100)
    large = Client(bodies)
    await large.send(101)
    with pytest.raises(HTTPError, match="exceeds max_body_bytes=100"):
        await large.task
    fits = Client(bodies)
    await fits.send(100, more=False)
    assert await fits.answer() == 100

"""Server-sent events: one answer in many pieces, dropped as soon as nobody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forkpoint.server.errors import CLIENT_LEFT, HTTPError, to_http

encode = msgspec.json.Encoder().encode
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # while there is nothing to say, so that no proxy takes a stream for dead
# Proxies are not to collect what should stream.
HEADERS: Final = MappingProxyType({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def event(data: object) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """An event with its type beside the data."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends what `events` yields. An error in the middle becomes what `on_error` makes of it.

    `on_close` is called at the end, however it came: by itself, by an error, or because the reader left.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        on_error: Callable[[HTTPError], bytes],
    ) -> None:
        super().__init__(_told(events, on_error), headers=HEADERS)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _told(events: AsyncIterator[bytes], on_error: Callable[[HTTPError], bytes]) -> AsyncIterator[bytes]:
    try:
        async for data in events:
            yield data
    except Exception as error:
        yield on_error(to_http(error, "a stream"))


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first. Raises HTTPError then."""
    task = asyncio.create_task(work)
    await _ended_or_left(receive, task)
    return task.result()


async def begin(
    receive: Receive, first_news: Coroutine[Any, Any, None], events: AsyncIterator[bytes], interval_s: float
) -> AsyncIterator[bytes]:
    """The stream, once its first news is there. Raises as `first_news` does and where the client leaves, before
    anything is sent.

    With an `interval_s` above 0 the stream begins after that time at the latest, and has a comment whenever so long
    nothing came: a request that fails later does so in the stream.
    """
    first = asyncio.create_task(first_news)
    await _ended_or_left(receive, first, interval_s or None)
    if first.done():
        first.result()
    return _with_comments(first, events, interval_s) if interval_s else events


async def _ended_or_left(receive: Receive, task: asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Wait for the end of `task`, but no longer than `timeout_s`. If the client leaves first it is cancelled, and
    HTTPError raised, for nobody to see."""
    leaver = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaver), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if leaver.done() and not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if task.cancelled():
                raise HTTPError(CLIENT_LEFT, "the client has left")
    except BaseException:
        task.cancel()
        raise
    finally:
        leaver.cancel()


async def _with_comments(
    first: asyncio.Task[None], events: AsyncIterator[bytes], interval_s: float
) -> AsyncIterator[bytes]:
    waiting: asyncio.Future[Any] = first
    try:
        if not first.done():
            yield COMMENT
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=interval_s)
            if not done:
                yield COMMENT
                continue
            data = waiting.result()
            if waiting is not first:
                if data is None:
                    return
                yield data
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()

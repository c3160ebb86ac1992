"""Server-sent events: answers in pieces. The work for an answer stops as soon as its client leaves."""

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
COMMENT = b": keep-alive\n\n"  # sent in silence, so that no proxy takes the stream for dead
MIN_WATCH_S: Final = 0.01  # time between two looks at a stream whose client is slow
# Proxies must pass a stream on at once instead of buffering it.
HEADERS: Final = MappingProxyType({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def event(data: object) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return an event with a line for its type before the data."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends the events, and a comment whenever nothing came for `interval_s` seconds (0: no comments).

    An error in the middle is sent as the events that `on_error` returns for it. `on_close` is called at the end of the
    stream, whether it is complete, has failed, or lost its client.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        on_error: Callable[[HTTPError], bytes],
        interval_s: float,
    ) -> None:
        super().__init__(_with_error(events, on_error), headers=HEADERS)
        self._on_close = on_close
        self._interval_s = interval_s
        self._sent_s = 0.0  # when something was sent last
        self._is_waiting = False  # whether it waits for an event; only then a comment may be sent
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for handle in (self._timer, self._comment):
                if handle is not None:
                    handle.cancel()
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        if self._interval_s:
            self._timer = loop.call_later(self._interval_s, self._watch, loop, send)
        self._is_waiting = True
        async for data in self.body_iterator:
            self._is_waiting = False
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_s, self._is_waiting = loop.time(), True
        self._is_waiting = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _watch(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        """Send a comment if nothing was sent for the interval and an event is awaited, and schedule the next look."""
        if self._is_waiting and loop.time() - self._sent_s >= self._interval_s:
            self._sent_s = loop.time()
            self._comment = loop.create_task(self._send_comment(send))
        next_s = max(self._sent_s + self._interval_s, loop.time() + MIN_WATCH_S)
        self._timer = loop.call_at(next_s, self._watch, loop, send)

    async def _send_comment(self, send: Send) -> None:
        if self._is_waiting:  # otherwise an event has come in the meantime, perhaps the last one
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def _with_error(events: AsyncIterator[bytes], on_error: Callable[[HTTPError], bytes]) -> AsyncIterator[bytes]:
    """Yield `events`. If they fail, yield the events of the error instead of raising."""
    try:
        async for data in events:
            yield data
    except Exception as error:
        yield on_error(to_http(error, "a stream"))


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` or raise its error. If the client leaves first, cancel it and raise HTTPError 499."""
    task = asyncio.create_task(work)
    await _ended_or_left(receive, task)
    return task.result()


async def begin(
    receive: Receive, first_news: Coroutine[Any, Any, None], events: AsyncIterator[bytes], interval_s: float
) -> AsyncIterator[bytes]:
    """Wait for `first_news`, and return the events of the stream.

    With an `interval_s` above 0 this takes at most `interval_s` seconds. The stream then begins with a comment, and a
    failure of `first_news` is reported in the stream. An earlier failure is raised before anything is sent, and so is
    HTTPError if the client leaves.
    """
    first = asyncio.create_task(first_news)
    await _ended_or_left(receive, first, interval_s or None)
    if not first.done():
        return _after(first, events)
    first.result()
    return events


async def _after(first: asyncio.Task[None], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a comment, wait for `first` and raise its error, or yield the events. Closing cancels `first`."""
    try:
        yield COMMENT
        await first
    finally:
        first.cancel()
    async for data in events:
        yield data


async def _ended_or_left(receive: Receive, task: asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Wait for the end of `task`, at most `timeout_s` seconds.

    If the client leaves first, cancel `task` and raise HTTPError, which only the log and the metrics see.
    """
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

"""HTTP connections with limits on the head of a request, on slow clients, and on the number of connections.

uvicorn has no such limits with its parser in C, whose cost grows with the square of the length of an endless line.

A request may be answered before its body has come, for example because the body is too large. The rest of the body is
then read at a bounded rate and dropped, so that clients which read only after they have sent all get the answer.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forkpoint.obs.logs import LOGGER, counted
from forkpoint.server.errors import HTTPError
from forkpoint.server.sse import encode

MAX_HEAD_BYTES: Final = 64 * 2**10  # request line and headers together; nginx and other proxies allow about 32 KiB
MAX_HEADERS: Final = 256  # vLLM's limit
PIECE_BYTES: Final = 16 * 2**10  # passed to the parser at once, so that the limit on the head is checked in between
HEAD_TIMEOUT_S: Final = 30.0  # from the opening of the connection, or a head's first byte, to the head's last byte
BODY_GRACE_S: Final = 30.0  # time for a body on top of what it needs at the lowest rate
MIN_BODY_BYTES_PER_S: Final = 1024  # the lowest rate
DISCARD_S: Final = 10.0  # time for the rest of a body whose request has been answered; then the connection is closed
UNPACED_BYTES: Final = 2 * 2**20  # the first bytes of a body, which are read as soon as they come
PACE_S: Final = 0.001  # between two reads, of at most 256 KiB, of the rest of such bodies, on all connections together
MAX_FILES: Final = 2**20  # open files; no client load needs more
RESERVED_FILES: Final = 128  # open files that are kept for files, readers and the engine
LOG_INTERVAL_S: Final = 10.0  # between two log lines about too many connections
UPGRADE: Final = re.compile(rb"\nupgrade:", re.IGNORECASE)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as the system allows (MAX_FILES), and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


class GivesWay(Protocol):
    """A connection that can be closed for a new one."""

    def give_way(self) -> None: ...


@dataclass(slots=True)
class Connections:
    """Counts the open connections and keeps those that can be closed for new ones.

    `waiting` holds connections that wait for a request to begin or for its head to end, and those whose TLS handshake
    is not over. The longest wait is first.
    """

    most: int
    refused: Callable[[int], None]  # called with the status of each refusal
    num_open: int = 0
    waiting: dict[GivesWay, None] = field(default_factory=dict)
    _logged_s: float | None = None  # when the lack of room was logged last
    _next_turn_s: float = 0.0  # when the next read of a large body may happen

    def make_room(self, now_s: float) -> bool:
        """Close a waiting connection if there are too many. Return False if there are too many and none waits.

        The lack of room is logged now and then. `now_s` is the event loop's time.
        """
        if self.num_open <= self.most:
            return True
        if self._logged_s is None or now_s - self._logged_s > LOG_INTERVAL_S:
            self._logged_s = now_s
            LOGGER.warning(
                "the limit of open files leaves room for %s at once; idle connections are closed for new ones. Raise "
                "the limit (ulimit -n) if these are real clients",
                counted(self.most, "connection"),
            )
        if not self.waiting:
            return False
        next(iter(self.waiting)).give_way()
        return True

    def next_turn(self, now_s: float) -> float:
        """Return when a connection may read more of a large body.

        All connections take turns, so large bodies take a bounded share of the event loop however many come.
        """
        self._next_turn_s = max(self._next_turn_s, now_s) + PACE_S
        return self._next_turn_s


class _Flow(FlowControl):
    """uvicorn's flow control, which does not resume reading while a connection waits for its turn."""

    waits = False

    def resume_reading(self) -> None:
        if not self.waits:
            super().resume_reading()


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """Return a `send` for a client that speaks HTTP/1.0, where an answer without a length ends with its connection.

    uvicorn would send such an answer in chunks, which HTTP/1.0 does not have.
    """
    send: Any = cycle.send
    cycle.chunked_encoding = False

    async def unchunked(message: Message) -> None:
        cycle.expected_content_length = len(message.get("body", b""))  # else uvicorn compares it with a length
        await send(message)

    return unchunked


def _before_close(cycle: RequestResponseCycle, close_later: Callable[[], None]) -> Send:
    """Return a `send` for a cycle after which uvicorn closes the connection.

    If the answer ends before the body of the request, `close_later` is called instead. A connection that is closed
    with unread bytes is reset, and the reset can take the answer along.
    """
    send: Any = cycle.send

    async def send_before_close(message: Message) -> None:
        ends = message["type"] == "http.response.body" and not message.get("more_body")
        if ends and cycle.more_body:
            cycle.keep_alive = True
            close_later()
        await send(message)

    return send_before_close


def _without_upgrade(piece: bytes) -> bytes:
    """Return bytes that begin in a head, in which the header Upgrade has a name that means nothing.

    No upgrade is supported. The parser would take the body of a request that asks for one for another protocol.
    """
    end = piece.find(b"\r\n\r\n")
    head = piece if end < 0 else piece[:end]
    return UPGRADE.sub(b"\nignored:", head) + piece[len(head) :]


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with the limits above. It refuses in JSON."""

    def __init__(self, *args: Any, shared: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None
        self._num_silent_bytes = 0  # bytes since the parser last reported the end of a head, or a part or end of a body
        self._in_head = True  # whether the head of a request is to come, or has come in part
        self._num_body_bytes = 0
        self._body_began_s = 0.0
        self._discards = False  # whether the rest of the body is dropped, because the request has been answered
        self._closes = False  # whether the connection is closed after that

    # --- asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._shared.num_open += 1
        if self._shared.make_room(self.loop.time()):
            self._wait_for_head()
        else:
            self._refuse(HTTPError(503, "the server has as many connections as it can; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.num_open -= 1
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing() or self.parser is None:
                return
            self._feed(data[start : start + PIECE_BYTES])
        if (self._discards or self._num_body_bytes > UNPACED_BYTES) and not self.transport.is_closing():
            self.flow.waits = True
            self.flow.pause_reading()
            self.loop.call_at(self._shared.next_turn(self.loop.time()), self._read_on)

    def _read_on(self) -> None:
        self.flow.waits = False
        is_full = self._is_answering() and len(self.cycle.body) > HIGH_WATER_LIMIT  # then the cycle resumes
        if not is_full and not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def give_way(self) -> None:
        """Close at once, without an answer, to make room for a new connection."""
        self._stop_waiting()
        self.transport.abort()

    def _feed(self, piece: bytes) -> None:
        if self._timer is None and not self._is_answering():
            self._wait_for_head()
        self._num_silent_bytes += len(piece)
        try:
            self.parser.feed_data(_without_upgrade(piece) if self._in_head else piece)
        except httptools.HttpParserUpgrade:
            pass  # the method CONNECT
        except httptools.HttpParserError:
            if self.headers is not None and len(self.headers) > MAX_HEADERS:
                self._refuse(HTTPError(431, f"the request has more than {MAX_HEADERS} headers; send fewer"))
            else:
                self._refuse(HTTPError(400, "this is not a valid HTTP request"))
            return
        if self._num_silent_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPError(431, f"the head of the request exceeds {MAX_HEAD_BYTES} bytes; send less"))

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # httptools turns it into an HttpParserError

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_silent_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment, method-assign]
        if not self.cycle.keep_alive:
            self.cycle.send = _before_close(self.cycle, self._close_later)  # type: ignore[assignment, method-assign]
        self._num_body_bytes, self._body_began_s = 0, self.loop.time()
        self._timer = self.loop.call_later(BODY_GRACE_S, self._check_body)

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_silent_bytes = 0
        self._stop_waiting()
        super().on_message_complete()
        if self._discards:
            self._discards = False
            if self._closes:
                self.transport.close()
            else:
                self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:
            return  # the connection is closing, or the next request has come already
        if self.cycle.more_body:
            self._stop_waiting()
            self._discards = True
            self._timer = self.loop.call_later(DISCARD_S, self.give_way)
        self._shared.waiting[self] = None

    def _close_later(self) -> None:
        self._closes = True

    # --- time

    def _wait_for_head(self) -> None:
        self._shared.waiting[self] = None
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        self._shared.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._refuse(HTTPError(408, f"no complete head of a request came within {HEAD_TIMEOUT_S:g} s"))

    def _check_body(self) -> None:
        allowed_s = BODY_GRACE_S + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = self._body_began_s + allowed_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check_body)
        else:
            self._refuse(HTTPError(408, f"the body comes at less than {MIN_BODY_BYTES_PER_S} bytes/s"))

    # --- refusals

    def _refuse(self, error: HTTPError) -> None:
        """Send `error` and close. If an answer has begun already, only close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self._shared.refused(error.status)
            body = encode(error.body())
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self._is_answering():
            self.cycle.disconnected = True  # ends the wait of whoever reads the rest of the body
            self.cycle.message_event.set()
        self.transport.close()

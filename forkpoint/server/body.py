"""Request bodies: routes that document them, memory that holds them, and parsing with errors that clients can use.

A route does not parse its body. It hands the raw bytes to a reader, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from forkpoint.checks import json_value, listed, member
from forkpoint.errors import EngineStoppedError
from forkpoint.server.errors import UNAVAILABLE, HTTPError, too_large
from forkpoint.server.sse import encode
from forkpoint.server.wrong_values import wrong_value

JSON_HINT = "send a JSON object with Content-Type: application/json"
MAX_DEPTH = 64  # levels of nested objects and lists; templates and schemas are read by recursion
PART_BYTES: Final = 64 * 2**10  # parts of a body grow to this size, so that slow clients do not leave many tiny ones
FREED_PARTS: Final = 32  # parts of a body that are freed at once
# Fields, of all APIs, whose values reach templates, schemas or answers without being parsed further.
PASSED_ON = frozenset(
    (
        *("messages", "system", "input", "tools", "functions", "documents", "chat_template_kwargs", "metadata"),
        *("text", "reasoning"),
    )
)
B = TypeVar("B", bound=BaseModel)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]
Parts: TypeAlias = "Sequence[bytes | bytearray]"  # of a body


class BodyRoute(APIRoute):
    """A route that passes the raw request to its endpoint.

    FastAPI would parse the body first. The endpoint's signature is there for the OpenAPI document; see `documents`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def documents(body: type[BaseModel], answer: Endpoint) -> Endpoint:
    """Return `answer` as an endpoint whose body the OpenAPI document describes by the model `body`.

    `answer` reads the body itself. It returns a response, which is sent as it is, or a pydantic model or JSON value,
    which is sent as JSON.
    """

    async def endpoint(request: Request) -> Response:
        answered = await answer(request)
        match answered:
            case Response():
                return answered
            case BaseModel():
                return Response(answered.model_dump_json(), media_type="application/json")
            case _:
                return Response(encode(answered), media_type="application/json")

    endpoint.__doc__ = body.__doc__
    shown = inspect.Parameter("body", inspect.Parameter.KEYWORD_ONLY, annotation=body)
    endpoint.__signature__ = inspect.Signature([shown])  # type: ignore[attr-defined]
    return endpoint


@dataclass(slots=True, eq=False)
class _Held:
    """One body in memory. Rescheduling `limit` to now ends its request."""

    num_bytes: int = 0
    limit: asyncio.Timeout = field(default_factory=partial(asyncio.timeout, None))


class Bodies:
    """Holds the bodies of all requests in memory, together at most `most * largest_bytes`.

    When there is no room left, the largest body is given up. Clients that send much, or slowly, therefore cannot keep
    out clients that send less.
    """

    def __init__(self, most: int, largest_bytes: int) -> None:
        self._most_bytes, self._largest_bytes = most * largest_bytes, largest_bytes
        self._num_bytes = 0
        self._held = set[_Held]()
        self._is_closed = False

    def close(self) -> None:
        """Give up all bodies, because the server ends."""
        self._is_closed = True
        for held in tuple(self._held):
            self._give_up(held)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Parts]:
        """Read the raw body and hold it until the context is left. It stays in parts: joining them takes too long.

        Raises HTTPError if the body is missing, cut off, too large, given up for others, or has no JSON Content-Type:
        web pages may send bodies of other types to any server. Raises EngineStoppedError after `close`.
        """
        held, parts = _Held(), list[bytearray]()
        self._held.add(held)
        try:
            async with held.limit:
                async for part in request.stream():
                    self._add(held, len(part))
                    if not parts or len(parts[-1]) >= PART_BYTES:
                        parts.append(bytearray())
                    parts[-1] += part
                _require_json(request, parts)
                yield parts
        except ClientDisconnect:
            raise HTTPError(400, "the client left before its body was complete") from None
        except TimeoutError:
            if held in self._held:
                raise
            if self._is_closed:
                raise EngineStoppedError("the server is shutting down") from None
            raise HTTPError(503, "too much is being sent at once; try again later", UNAVAILABLE) from None
        finally:
            self._drop(held)
            while len(parts) > FREED_PARTS:  # returning all memory at once would hold up the event loop
                del parts[-FREED_PARTS:]
                await asyncio.sleep(0)

    def _add(self, held: _Held, num_bytes: int) -> None:
        """Count more bytes of a body, and give up others if needed.

        Raises HTTPError if it is too large, and TimeoutError if it has been given up itself.
        """
        if held in self._held:
            held.num_bytes += num_bytes
            self._num_bytes += num_bytes
            if held.num_bytes > self._largest_bytes:
                raise too_large(self._largest_bytes)
        while self._num_bytes > self._most_bytes:
            largest = max(self._held, key=lambda other: other.num_bytes)
            self._give_up(largest)
        if held not in self._held:
            raise TimeoutError

    def _give_up(self, held: _Held) -> None:
        """End the request of a body."""
        self._drop(held)
        held.limit.reschedule(asyncio.get_running_loop().time())

    def _drop(self, held: _Held) -> None:
        if held in self._held:
            self._held.remove(held)
            self._num_bytes -= held.num_bytes


def _require_json(request: Request, body: Parts) -> None:
    if not body or not body[0]:
        raise HTTPError(400, f"the body is empty; {JSON_HINT}")
    if not is_json(request.headers.get("content-type", "").encode("latin-1")):
        raise HTTPError(400, f"the Content-Type is {request.headers.get('content-type', '')!r}; {JSON_HINT}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HTTPError(400, f"the Content-Encoding is {encoding!r}; send the body without compression")


def is_json(content_type: bytes) -> bool:
    """Return whether a Content-Type is JSON. Browsers send a preflight before a page may send JSON to another site."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def parse(model: type[B], data: bytes) -> B:
    """Return a JSON body as `model`. Raises HTTPError 400 naming the first thing that is wrong."""
    try:
        values = json.loads(data.decode("utf-8-sig"))  # `json` itself would let lone surrogates pass
    except (ValueError, RecursionError) as error:
        raise _wrong_json(error) from None
    if isinstance(values, dict):
        if b"\\u" in data:
            for name, value in values.items():
                _require_unicode(name, value)
        for name in PASSED_ON & values.keys():
            _check_depth(name, values[name])
    return validated(model, values)


def _check_depth(name: str, value: object) -> None:
    """Raise HTTPError for a value nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise HTTPError(400, f"{name} is nested more than {MAX_DEPTH} deep; give it flatter", param=name)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return listed(value)


def _require_unicode(name: str, value: object) -> None:
    """Raise HTTPError for a lone surrogate. JSON can escape one, but it has no UTF-8 form, so no answer can hold it."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown_name = ascii(name)[1:-1]
        half = f"U+{ord(error.object[error.start]):04X}"
        text = f"{shown_name}: the lone surrogate {half} is not text; send valid Unicode"
        raise HTTPError(400, text, param=shown_name) from None


def validated(model: type[B], values: object) -> B:
    """Return `values` as `model`. Raises HTTPError 400 naming the first thing that is wrong."""
    if values is None:
        raise HTTPError(400, f"the body is empty; {JSON_HINT}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise wrong_value(error.errors(include_url=False)) from None


def _wrong_json(error: Exception) -> HTTPError:
    """Return an error that says why `json` could not read a body."""
    match error:
        case json.JSONDecodeError():
            said = f"{error.msg.removesuffix(' at').removesuffix(' starting')} at character {error.pos}"
        case UnicodeDecodeError():
            said = f"byte {error.start} is not {error.encoding}; send UTF-8"
        case RecursionError():
            said = "it is nested too deeply"
        case _:  # the only other error that `json` raises
            said = f"an integer has more than {sys.get_int_max_str_digits()} digits"
    return HTTPError(400, f"the body is not valid JSON: {said}")


def transfer_params(data: bytes) -> object:
    """Return the `kv_transfer_params` of a raw body that may be malformed; None if there are none."""
    if b"kv_transfer_params" not in data:
        return None
    return member(json_value(data), "kv_transfer_params")

"""Bodies of requests: routes that document them and leave them to be read off the event loop, and how they are read
and what is said of those that are wrong."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from forkpoint.server.errors import UNAVAILABLE, HTTPError, too_large
from forkpoint.server.sse import encode

JSON_HINT = "send a JSON object with Content-Type: application/json"
MAX_SHOWN = 80  # characters of a wrong value, in an error message
KIND = re.compile(r"str|int|[A-Z]\w*|.*\[.*")  # how pydantic names the alternatives of a field, beside field names
MAX_DEPTH = 64  # of objects and lists in each other
# Fields of all APIs that reach templates, schemas or answers as they are.
PASSED_ON = frozenset(
    ("messages", "system", "input", "tools", "documents", "chat_template_kwargs", "metadata", "text", "reasoning")
)
B = TypeVar("B", bound=BaseModel)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


class BodyRoute(APIRoute):
    """Calls its endpoint with the request alone. The endpoint's signature is that of the document: see `documents`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def documents(body: type[BaseModel], answer: Endpoint) -> Endpoint:
    """`answer`, which reads a `body` by itself, as an endpoint of whose body the OpenAPI document tells. What it
    answers, a model or what JSON knows, is sent as JSON unless it is a response already."""

    async def endpoint(request: Request) -> Response:
        answered = await answer(request)
        if isinstance(answered, Response):
            return answered
        data = answered.model_dump_json() if isinstance(answered, BaseModel) else encode(answered)
        return Response(data, media_type="application/json")

    endpoint.__doc__ = body.__doc__
    shown = inspect.Parameter("body", inspect.Parameter.KEYWORD_ONLY, annotation=body)
    endpoint.__signature__ = inspect.Signature([shown])  # type: ignore[attr-defined]
    return endpoint


@dataclass(slots=True, eq=False)
class _Held:
    """One body in memory. `limit` ends its request."""

    num_bytes: int = 0
    limit: asyncio.Timeout = field(default_factory=partial(asyncio.timeout, None))


class Bodies:
    """Holds the bodies of all requests in memory: at most `most` times `largest_bytes` together.

    Where there is no more room, the largest body is given up. Clients that send much, or slowly, therefore keep out
    nobody who sends less.
    """

    def __init__(self, most: int, largest_bytes: int) -> None:
        self._most_bytes, self._largest_bytes = most * largest_bytes, largest_bytes
        self._num_bytes = 0
        self._held = set[_Held]()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read the raw body and hold it until the context is left.

        Raises HTTPError if the body is missing, too large, or given up for others. Also raises it for a body without
        a JSON Content-Type, since web pages may send such bodies to any server.
        """
        held, parts = _Held(), list[bytes]()
        self._held.add(held)
        try:
            async with held.limit:
                async for part in request.stream():
                    parts.append(part)
                    self._add(held, len(part))
                yield _json_body(request, b"".join(parts))
        except ClientDisconnect:
            raise HTTPError(400, "the client left before its body was complete") from None
        except TimeoutError:
            if held in self._held:
                raise
            raise HTTPError(503, "too much is being sent at once; try again later", UNAVAILABLE) from None
        finally:
            self._drop(held)

    def _add(self, held: _Held, num_bytes: int) -> None:
        """Count more bytes of a body. Raises TimeoutError if it has been given up."""
        if held in self._held:
            held.num_bytes += num_bytes
            self._num_bytes += num_bytes
            if held.num_bytes > self._largest_bytes:
                raise too_large(self._largest_bytes)
        while self._num_bytes > self._most_bytes:
            largest = max(self._held, key=lambda other: other.num_bytes)
            self._drop(largest)
            largest.limit.reschedule(asyncio.get_running_loop().time())
        if held not in self._held:
            raise TimeoutError

    def _drop(self, held: _Held) -> None:
        if held in self._held:
            self._held.remove(held)
            self._num_bytes -= held.num_bytes


def _json_body(request: Request, data: bytes) -> bytes:
    if not data:
        raise HTTPError(400, f"the body is empty; {JSON_HINT}")
    if not is_json(request.headers.get("content-type", "").encode("latin-1")):
        raise HTTPError(400, f"the body is {_shown(data)}; {JSON_HINT}")
    return data


def is_json(content_type: bytes) -> bool:
    """Return whether a Content-Type is one of JSON's. Browsers let no page send those to other sites unasked."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def parse(model: type[B], data: bytes) -> B:
    """The body as `model`. Raises HTTPError 400 that says what is wrong first."""
    try:
        values = json.loads(data)
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
    """Raises HTTPError for a value that is nested deeper than templates and schemas are read."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise HTTPError(400, f"{name} is nested more than {MAX_DEPTH} deep; give it flatter", param=name)


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _require_unicode(name: str, value: object) -> None:
    """JSON can escape half a character, for which no bytes stand, and which no answer could repeat."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown_name = ascii(name)[1:-1]
        half = f"U+{ord(error.object[error.start]):04X}"
        text = f"{shown_name}: the lone surrogate {half} is no text; send valid Unicode"
        raise HTTPError(400, text, param=shown_name) from None


def validated(model: type[B], values: object) -> B:
    """`values` as `model`. Raises HTTPError 400 that says what is wrong first."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _wrong_body(error.errors(include_url=False)) from None


def _wrong_body(errors: Sequence[Mapping[str, Any]]) -> HTTPError:
    """What is wrong with a body, of all that pydantic found."""
    error = _most_telling(errors)
    place = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or not KIND.fullmatch(part))
    if not place and error["input"] is None:
        return HTTPError(400, f"the body is empty; {JSON_HINT}")
    said = "Input should be an object" if error["type"] == "model_type" else error["msg"]  # else it names our class
    return HTTPError(400, f"{place or 'the body'}: {said}; given {_shown(error['input'])}", param=place or None)


def _wrong_json(error: Exception) -> HTTPError:
    """What is wrong with a body that `json` could not read."""
    match error:
        case json.JSONDecodeError():
            said = f"{error.msg} at character {error.pos}"
        case UnicodeDecodeError():
            said = f"byte {error.start} is no {error.encoding}; send UTF-8"
        case RecursionError():
            said = "it is nested too deeply"
        case _:
            said = str(error)
    return HTTPError(400, f"the body is not valid JSON: {said}")


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the most useful error of the first wrong field. If the field has several kinds, use the kind that fits
    best."""
    by_kind: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for error in errors:
        if error["loc"][:1] == errors[0]["loc"][:1]:
            by_kind[error["loc"][1:2]].append(error)
    return min(by_kind.values(), key=lambda found: (len(found), -len(found[0]["loc"]), -_num_right(found[0])))[0]


def _num_right(error: Mapping[str, Any]) -> int:
    """Elements of a list before the wrong one."""
    return next((part for part in error["loc"][1:] if isinstance(part, int)), 0)


def _shown(value: object) -> str:
    """Return the beginning of a wrong value, for an error message."""
    text = repr(_beginning(value))
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _beginning(value: object) -> object:
    """Return enough of a value to show its first `MAX_SHOWN` characters; writing all of it can take seconds."""
    match value:
        case str() | bytes():
            return value[: MAX_SHOWN + 1]
        case list():
            return [_beginning(inner) for inner in value[:MAX_SHOWN]]
        case dict():
            return {_beginning(name): _beginning(inner) for name, inner in islice(value.items(), MAX_SHOWN)}
    return value

"""Bodies of requests: routes that document them and leave them to be read off the event loop, and how they are read
and what is said of those that are wrong."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from forkpoint.server.errors import HTTPError, too_large
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


class Bodies:
    """The bodies that are held in memory at once: at most so many times the bytes of the largest that is allowed."""

    def __init__(self, most: int, largest_bytes: int) -> None:
        self._most_bytes, self._largest_bytes = most * largest_bytes, largest_bytes
        self._num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The raw body, held until the context is left. Raises HTTPError where none comes, where there is no room, and
        for one that is too large or not said to be JSON: browsers send others without asking first."""
        parts, num_bytes = list[bytes](), 0
        try:
            async for part in request.stream():
                parts.append(part)
                num_bytes += len(part)
                self._num_bytes += len(part)
                if num_bytes > self._largest_bytes:
                    raise too_large(self._largest_bytes)
                if self._num_bytes > self._most_bytes:
                    raise HTTPError(503, "too much is being sent at once; try again later", "service_unavailable_error")
            yield _json_body(request, b"".join(parts))
        except ClientDisconnect:
            raise HTTPError(400, "the client left before its body was complete") from None
        finally:
            self._num_bytes -= num_bytes


def _json_body(request: Request, data: bytes) -> bytes:
    if not data:
        raise HTTPError(400, f"the body is empty; {JSON_HINT}")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPError(400, f"the body is {_shown(data)}; {JSON_HINT}")
    return data


def parse(model: type[B], data: bytes) -> B:
    """The body as `model`. Raises HTTPError 400 that says what is wrong first."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong_json(error) from None
    has_escapes = b"\\u" in data  # looked for once: a body may have many thousand fields
    for name, value in values.items() if isinstance(values, dict) else ():
        if has_escapes:
            _require_unicode(name, value)
        if name in PASSED_ON:
            _check_depth(name, value)
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
    """Of the first wrong field: where it may be of several kinds, of the kind that it is most nearly."""
    by_kind: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for error in errors:
        if error["loc"][:1] == errors[0]["loc"][:1]:
            by_kind[error["loc"][1:2]].append(error)
    return min(by_kind.values(), key=lambda found: (len(found), -len(found[0]["loc"]), -_num_right(found[0])))[0]


def _num_right(error: Mapping[str, Any]) -> int:
    """Elements of a list before the wrong one."""
    return next((part for part in error["loc"][1:] if isinstance(part, int)), 0)


def _shown(value: object) -> str:
    """The beginning of a wrong value, for an error message."""
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."

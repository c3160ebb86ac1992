"""What clients are told when something is wrong: OpenAI's error objects, whoever raised."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from forkpoint.errors import ForkpointError
from forkpoint.obs.logs import LOGGER
from forkpoint.server.errors import HTTPError, to_http

MAX_SHOWN = 80  # characters of a wrong value, in an error message
KIND = re.compile(r"str|int|[A-Z]\w*|.*\[.*")  # how pydantic names the alternatives of a field, beside field names
JSON_HINT = "send a JSON object with Content-Type: application/json"


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPError)
    @app.exception_handler(ForkpointError)
    async def on_error(request: Request, error: Exception) -> Response:
        told = to_http(error)
        return JSONResponse(told.body(), told.status, told.headers)

    @app.exception_handler(Exception)
    async def on_unexpected(request: Request, error: Exception) -> Response:
        LOGGER.error("%s %s: unexpected error", request.method, request.url.path, exc_info=error)
        told = to_http(error)
        return JSONResponse(told.body(), told.status)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        told = wrong_body(error.errors())
        return JSONResponse(told.body(), told.status)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        told = _refusal(request, error, headers)
        return JSONResponse(told.body(), told.status, headers)


def wrong_body(errors: Sequence[Mapping[str, Any]]) -> HTTPError:
    """What is wrong with a body, of all that pydantic found."""
    error = _most_telling(errors)
    place = ".".join(str(part) for part in error["loc"][1:] if isinstance(part, int) or not KIND.fullmatch(part))
    if error["type"] == "json_invalid":
        return HTTPError(400, f"the body is not valid JSON: {error['ctx']['error']} at character {error['loc'][-1]}")
    if not place and error["input"] in (None, b""):
        return HTTPError(400, f"the body is empty; {JSON_HINT}")
    if not place and isinstance(error["input"], bytes):
        return HTTPError(400, f"the body is {_shown(error['input'])}; {JSON_HINT}")
    return HTTPError(400, f"{place or 'the body'}: {error['msg']}; given {_shown(error['input'])}", param=place or None)


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the first wrong field: where it may be of several kinds, of the kind that it is most nearly."""
    by_kind: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for error in errors:
        if error["loc"][:2] == errors[0]["loc"][:2]:
            by_kind[error["loc"][2:3]].append(error)
    return min(by_kind.values(), key=lambda found: (len(found), -len(found[0]["loc"])))[0]


def _refusal(request: Request, error: HTTPException, headers: Mapping[str, str]) -> HTTPError:
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return HTTPError(404, f"there is no {asked}; /docs lists what there is", "not_found_error")
    if error.status_code == 405:
        return HTTPError(405, f"{asked} is not allowed; use {headers.get('Allow', headers.get('allow', 'another'))}")
    return HTTPError(error.status_code, str(error.detail))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."

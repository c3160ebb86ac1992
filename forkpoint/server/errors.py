"""Errors as clients receive them: OpenAI's or Anthropic's error objects, made from the exceptions of all parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from forkpoint.errors import (
    EngineNotReadyError,
    EngineStoppedError,
    ForkpointError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTooLargeError,
)
from forkpoint.obs.logs import LOGGER

MESSAGES_TYPES: Final = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)
PROMPT_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
# Paths that an error suggests. Clients with a wrong base URL ask without /v1, or with it twice.
PATHS: Final = (
    *PROMPT_PATHS,
    *("/v1/models", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
    *("/health", "/metrics", "/version"),
)
# Paths that a server has only with a flag.
PATHS_BY_FLAG: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--enable-dev-endpoints": ("/reset_prefix_cache", "/check_integrity"),
        "--enable-tokenizer-info-endpoint": ("/tokenizer_info",),
        "--kv-events-config": tuple(f"/prefix{path}" for path in PROMPT_PATHS),
    }
)
MAX_PATH: Final = 64  # characters of another path that are compared with these
CLIENT_LEFT: Final = 499  # nginx's status for a client that left; it appears in the log and the metrics only
RETRY_AFTER_S: Final = 1  # seconds; the Retry-After header of refusals for lack of room
INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable_error"
# (status, type, code) of each exception. A subclass stands before its base class, since the first match counts.
ANSWERS: Final[Mapping[type[ForkpointError], tuple[int, str, str | None]]] = MappingProxyType(
    {
        QueueFullError: (429, "rate_limit_error", "queue_full"),
        RequestTooLargeError: (400, INVALID, "request_too_large"),
        PromptTooLongError: (400, INVALID, "context_length_exceeded"),  # OpenAI's code, by which agents know it
        RequestError: (400, INVALID, None),
        EngineNotReadyError: (503, UNAVAILABLE, "loading"),
        EngineStoppedError: (503, UNAVAILABLE, "engine_stopped"),
        ForkpointError: (500, "server_error", None),
    }
)


@dataclass(eq=False)
class HTTPError(Exception):
    """An error to answer with. `type`, `param` and `code` follow OpenAI."""

    status: int
    message: str
    type: str = INVALID
    _: KW_ONLY
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, object]:
        """Return the error's body in the form of Anthropic's API."""
        kind = MESSAGES_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        details = {"error_code": self.code} if self.code is not None else None
        return {"type": "error", "error": {"type": kind, "message": self.message, "details": details}}

    def body_for(self, scope: Scope) -> dict[str, object]:
        """Return the error's body in the form that the client of the request `scope` reads."""
        return self.messages_body() if is_anthropic(scope) else self.body()

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or by the header that its clients send."""
    return "/v1/messages" in scope["path"] or any(name == b"anthropic-version" for name, _ in scope["headers"])


def too_large(most_bytes: int) -> HTTPError:
    """Return the error for a body of more than `most_bytes` bytes."""
    return HTTPError(413, f"the request body exceeds max_body_bytes={most_bytes}; send less", code="body_too_large")


def to_http(error: Exception, broken: str) -> HTTPError:
    """Return the HTTPError that answers `error`.

    An unexpected exception becomes a 500 that names its class. It is logged with its traceback, and with `broken`, the
    work that it ended.
    """
    if isinstance(error, HTTPError):
        return error
    for kind, (status, type_name, code) in ANSWERS.items():
        if isinstance(error, kind):
            return HTTPError(status, str(error), type_name, code=code)
    LOGGER.error("%s: unexpected error", broken, exc_info=error)
    return HTTPError(500, f"unexpected {type(error).__name__}", "server_error")


def add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        headers = dict(getattr(error, "headers", None) or {})
        if isinstance(error, HTTPException):
            answer = _refusal(request, error, headers)
        else:
            answer = to_http(error, f"{request.method} {request.url.path}")
        return JSONResponse(answer.body_for(request.scope), answer.status, headers | answer.headers)

    for kind in (HTTPError, ForkpointError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _refusal(request: Request, error: HTTPException, headers: Mapping[str, str]) -> HTTPError:
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        path = request.url.path.removeprefix(request.scope["root_path"])
        for flag, paths in PATHS_BY_FLAG.items():
            if path in paths:
                text = f"there is no {asked} without {flag}; start the server with it"
                return HTTPError(404, text, "not_found_error")
        near = get_close_matches(request.url.path[:MAX_PATH], PATHS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "/docs lists what there is"
        return HTTPError(404, f"there is no {asked}; {hint}", "not_found_error")
    if error.status_code == 405:
        return HTTPError(405, f"{asked} is not allowed; use {headers.get('Allow', headers.get('allow', 'another'))}")
    return HTTPError(error.status_code, str(error.detail))

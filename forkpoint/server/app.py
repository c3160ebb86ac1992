"""The routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from forkpoint.errors import ForkpointError
from forkpoint.obs.logs import LOGGER
from forkpoint.obs.prometheus import CONTENT_TYPE
from forkpoint.server.chat import ChatBody, ChatReply, create_chat_completion
from forkpoint.server.completions import CompletionBody, CompletionReply, create_completion
from forkpoint.server.errors import HTTPError, to_http
from forkpoint.server.middleware import Gate
from forkpoint.server.protocol import DoneReply, ErrorReply, ModelCard, ModelList, VersionReply
from forkpoint.server.service import Service
from forkpoint.server.tokens import (
    DetokenizeBody,
    DetokenizeReply,
    TokenizeBody,
    TokenizeReply,
    detokenize,
    tokenize,
)
from forkpoint.version import installed_version

MAX_SHOWN = 80  # characters of a wrong value, in an error message
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text}
    for status, text in {
        400: "the request is wrong",
        401: "no valid API key",
        404: "no such model",
        413: "the body is too large",
        429: "too many requests are open or waiting",
        500: "the request failed while it ran",
        503: "the model is loading, or the engine has stopped",
    }.items()
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer; with `stream` in events, each `data: {chunk}`, the last one `data: [DONE]`",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def create_app(service: Service) -> FastAPI:
    """The ASGI application. The engine may still be loading; what needs it answers 503 until it is ready."""
    app = FastAPI(title="forkpoint", version=installed_version(), docs_url="/docs", redoc_url=None)
    app.add_middleware(Gate, config=service.config)
    _add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_token_routes(app, service)
    _add_operator_routes(app, service)
    if service.config.enable_dev_endpoints:
        _add_dev_routes(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
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
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        told = HTTPError(400, f"{place or 'the body'}: {first['msg']}; given {_shown(first)}", param=place or None)
        return JSONResponse(told.body(), told.status)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        told = HTTPError(error.status_code, str(error.detail), kind)
        return JSONResponse(told.body(), told.status, dict(error.headers or {}))


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=ChatReply, responses={**ERRORS, **STREAM})
    async def chat_completions(body: ChatBody, request: Request) -> Any:
        return _json(await create_chat_completion(service, body, request))

    @app.post("/v1/completions", response_model=CompletionReply, responses={**ERRORS, **STREAM})
    async def completions(body: CompletionBody, request: Request) -> Any:
        return _json(await create_completion(service, body, request))

    @app.get("/v1/models", response_model=ModelList, responses=ERRORS)
    async def models() -> ModelList:
        limit = service.engine.inputs.max_model_len
        return ModelList(
            data=[
                ModelCard(id=name, created=service.created, root=service.model, max_model_len=limit)
                for name in service.names
            ]
        )


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=TokenizeReply, responses=ERRORS)
    async def tokenize_text(body: TokenizeBody) -> TokenizeReply:
        return await tokenize(service, body)

    @app.post("/detokenize", response_model=DetokenizeReply, responses=ERRORS)
    async def detokenize_ids(body: DetokenizeBody) -> DetokenizeReply:
        return await detokenize(service, body)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response, responses={503: ERRORS[503]})
    async def health() -> Response:
        """200 when requests are served; 503 while the model loads and after the engine has stopped."""
        service.check_healthy()
        return Response(status_code=200)

    @app.get("/version", response_model=VersionReply)
    async def forkpoint_version() -> VersionReply:
        return VersionReply(version=installed_version())

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus' text format. Without the engine's own figures while there is no engine to ask."""
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        page = files("forkpoint.server").joinpath("static/index.html")
        return HTMLResponse(page.read_text("utf-8"))


def _add_dev_routes(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", response_model=DoneReply, responses=ERRORS)
    async def reset_prefix_cache() -> DoneReply:
        """Nothing cached so far is found again."""
        return DoneReply(done=bool(await service.engine.call("reset_prefix_cache")))

    @app.post("/check_integrity", response_model=DoneReply, responses=ERRORS)
    async def check_integrity() -> DoneReply:
        """Check that all pages, blocks, slots and checkpoints of the cache add up; 500 says what does not."""
        return DoneReply(done=bool(await service.engine.call("check_integrity")))


def _shown(error: Mapping[str, Any]) -> str:
    text = repr(error.get("input"))
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _json(answer: Any) -> Any:
    """A finished answer as bytes at once: it needs no second validation."""
    if isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")


def quiet_libraries() -> None:
    """uvicorn's own log goes where forkpoint's does, warnings and above."""
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = list(LOGGER.handlers)
        logger.propagate = False
        logger.setLevel(logging.WARNING)

"""Routes of the HTTP server: which path is answered by which function."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route

from forkpoint.server.api_answer import create
from forkpoint.server.body import BodyRoute, Endpoint, documents
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.chat.endpoint import ChatAnswer, ChatReply, prepare_chat
from forkpoint.server.completions.body import CompletionBody
from forkpoint.server.completions.endpoint import CompletionReply, TextAnswer, prepare_completion
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import add_error_handlers
from forkpoint.server.invocations import invoke
from forkpoint.server.messages.body import CountTokensBody, MessagesBody
from forkpoint.server.messages.endpoint import (
    CountReply,
    MessageAnswer,
    MessageReply,
    MessagesErrorReply,
    count_tokens,
    prepare_message,
)
from forkpoint.server.metrics import CONTENT_TYPE
from forkpoint.server.middleware import Gate
from forkpoint.server.page import add_page
from forkpoint.server.prefix import PromptReader, read_prefix
from forkpoint.server.protocol import DoneReply, ErrorReply, LoadReply, ModelCard, ModelList, VersionReply
from forkpoint.server.responses.answer import CountedTokens, DeletedReply, ResponseReply
from forkpoint.server.responses.body import CountBody, ResponsesBody
from forkpoint.server.responses.endpoint import Responses, prepare_response
from forkpoint.server.responses.input_items import ItemsQuery, ItemsReply
from forkpoint.server.service import Service
from forkpoint.server.texts import Prepare, served_name
from forkpoint.server.tokens import (
    DetokenizeBody,
    DetokenizeReply,
    TokenizeBody,
    TokenizeReply,
    TokenizerInfo,
    detokenize,
    tokenize,
    tokenizer_info,
)
from forkpoint.version import installed_version

Answers: TypeAlias = dict[int | str, dict[str, Any]]
ERRORS: Answers = {
    status: {"model": ErrorReply, "description": text}
    for status, text in {
        400: "the request is wrong",
        401: "no valid API key",
        403: "the host is not this server's",
        404: "no such model",
        413: "the body is too large",
        429: "too many requests are open or waiting",
        500: "the request failed while it ran",
        503: "the model is loading, or the engine has stopped",
    }.items()
}
MESSAGES_ERRORS: Answers = {status: {**answer, "model": MessagesErrorReply} for status, answer in ERRORS.items()}
STREAM: Answers = {
    200: {
        "description": "the answer; with `stream` in events, each `data: {chunk}`, the last one `data: [DONE]`",
        "content": {"text/event-stream": {}},
    }
}


PROMPTS: tuple[tuple[str, type[BaseModel], PromptReader], ...] = (
    ("/v1/chat/completions", ChatBody, prepare_chat),
    ("/v1/completions", CompletionBody, prepare_completion),
    ("/v1/messages", MessagesBody, prepare_message),
    ("/v1/responses", ResponsesBody, prepare_response),
)


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application. Routes that need the engine answer 503 until it has loaded."""
    app = FastAPI(title="forkpoint", version=installed_version(), docs_url="/docs", redoc_url=None)
    app.add_middleware(Gate, config=service.config, metrics=service.metrics)
    _allow_origins(app, service.config)
    add_error_handlers(app)
    responses = Responses(service)
    _add_body_routes(app, service, responses)
    _add_response_routes(app, responses)
    _add_model_routes(app, service)
    _add_operator_routes(app, service)
    _add_document(app)
    add_page(app)
    if service.config.enable_tokenizer_info_endpoint:
        _add_tokenizer_route(app, service)
    if service.config.enable_dev_endpoints:
        _add_dev_routes(app, service)
    return app


def _add_document(app: FastAPI) -> None:
    """Serve the OpenAPI document, which is generated when it is first asked for and then kept.

    Most servers are never asked. Generating it takes half a second, so a thread does it and other requests go on.
    """
    (plain,) = (route for route in app.routes if isinstance(route, Route) and route.path == app.openapi_url)
    app.router.routes.remove(plain)

    async def document(request: Request) -> Response:
        await asyncio.to_thread(app.openapi)
        answer: Response = await plain.endpoint(request)
        return answer

    app.add_route(plain.path, document, include_in_schema=False)


def _allow_origins(app: FastAPI, config: ServerConfig) -> None:
    """Add CORS if origins are allowed. Added last, it runs first: preflights have no key, and refusals may be read."""
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )


def _add_body_routes(app: FastAPI, service: Service, responses: Responses) -> None:
    routes = APIRouter(route_class=BodyRoute)

    def add(path: str, body: type[BaseModel], answer: Endpoint, reply: type[BaseModel], others: Answers) -> None:
        own, name = documents(body, answer), path.removeprefix("/v1").strip("/").replace("/", "_")
        routes.add_api_route(path, own, methods=["POST"], response_model=reply, responses=others, name=name)

    def read(prepare: Prepare[Any]) -> Endpoint:
        return partial(service.prepare, prepare)

    answers = partial(create, service)
    streams, messages = {**ERRORS, **STREAM}, {**MESSAGES_ERRORS, **STREAM}
    add("/v1/chat/completions", ChatBody, partial(answers, prepare_chat, ChatAnswer), ChatReply, streams)
    add("/v1/completions", CompletionBody, partial(answers, prepare_completion, TextAnswer), CompletionReply, streams)
    add("/v1/messages", MessagesBody, partial(answers, prepare_message, MessageAnswer), MessageReply, messages)
    add("/v1/messages/count_tokens", CountTokensBody, read(count_tokens), CountReply, MESSAGES_ERRORS)
    add("/v1/responses", ResponsesBody, responses.create, ResponseReply, streams)
    add("/v1/responses/input_tokens", CountBody, responses.count, CountedTokens, ERRORS)
    add("/tokenize", TokenizeBody, read(tokenize), TokenizeReply, ERRORS)
    add("/detokenize", DetokenizeBody, read(detokenize), DetokenizeReply, ERRORS)
    either = documents(ChatBody, partial(invoke, service))  # or CompletionBody
    routes.add_api_route("/invocations", either, methods=["POST"], include_in_schema=False)
    if service.engine.config.kv_events_config.is_on:
        for path, body, prepare in PROMPTS:  # a router sends a body here first, to choose the replica that answers it
            own = documents(body, read(partial(read_prefix, prepare, service.config.salts_by_key)))
            routes.add_api_route("/prefix" + path, own, methods=["POST"], include_in_schema=False)
    app.include_router(routes)


def _add_response_routes(app: FastAPI, responses: Responses) -> None:
    for method, path, answer, reply, query in (
        ("GET", "/v1/responses/{name}", responses.retrieve, ResponseReply, None),
        ("GET", "/v1/responses/{name}/input_items", responses.input_items, ItemsReply, ItemsQuery),
        ("POST", "/v1/responses/compact", responses.compact, ErrorReply, None),
        ("POST", "/v1/responses/{name}/cancel", responses.cancel, ResponseReply, None),
        ("DELETE", "/v1/responses/{name}", responses.delete, DeletedReply, None),
    ):
        fields = query.model_json_schema()["properties"] if query is not None else {}
        shown = {"parameters": [{"name": each, "in": "query", "schema": fields[each]} for each in fields]}
        app.add_api_route(path, answer, methods=[method], response_model=reply, responses=ERRORS, openapi_extra=shown)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    names = service.config.served_model_name

    def card(name: str) -> ModelCard:
        limit = service.engine.inputs.max_model_len
        return ModelCard(
            id=name,
            created=service.created,
            root=service.engine.config.model,
            max_model_len=limit,
            input_modalities=["text", *service.media],
            display_name=name,
            created_at=datetime.fromtimestamp(service.created, UTC).isoformat(),
            max_input_tokens=limit,
            max_tokens=limit,
        )

    @app.get("/v1/models/", include_in_schema=False)  # otherwise this would be the model without a name
    @app.get("/v1/models", response_model=ModelList, responses=ERRORS)
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in names], first_id=names[0], last_id=names[-1])

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=ERRORS)
    async def model(name: str) -> ModelCard:
        return card(served_name(names, name))


def _add_tokenizer_route(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info", response_model=TokenizerInfo, responses=ERRORS)
    async def info(request: Request) -> TokenizerInfo:
        """Return what clients have to know to use the tokenizer by /tokenize and /detokenize."""
        service.check_healthy()
        with service.readers.counted():
            return await service.prepare_from((), tokenizer_info, request)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response, responses={503: ERRORS[503]})
    async def health() -> Response:
        """Answer 200 while requests are served, 503 while the model loads and after the engine has stopped."""
        service.check_healthy()
        return Response(status_code=200)

    @app.get("/version", response_model=VersionReply)
    async def forkpoint_version() -> VersionReply:
        return VersionReply(version=installed_version())

    @app.get("/load", response_model=LoadReply)
    async def load() -> LoadReply:
        return LoadReply(server_load=service.num_open)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format. The engine's are missing while the engine is not ready."""
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE)

    for path, answer in (("/health", health), ("/metrics", metrics)):
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)  # as SageMaker asks


def _add_dev_routes(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", response_model=DoneReply, responses=ERRORS)
    async def reset_prefix_cache() -> DoneReply:
        """Make the prefix cache forget all that it holds."""
        await service.engine.call("reset_prefix_cache")
        return DoneReply(done=True)

    @app.post("/check_integrity", response_model=DoneReply, responses=ERRORS)
    async def check_integrity() -> DoneReply:
        """Check that the cache's pages, blocks, slots and checkpoints add up. Answers 500 naming the first mismatch."""
        await service.engine.call("check_integrity")
        return DoneReply(done=True)

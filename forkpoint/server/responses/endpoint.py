"""POST /v1/responses, and what can be done with a stored response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from forkpoint.server.body import validated
from forkpoint.server.chat_body import ChatBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.middleware import KEY
from forkpoint.server.responses.answer import CountedTokens, DeletedReply, PreparedResponse, ResponseAnswer
from forkpoint.server.responses.body import CountBody, ResponsesBody, chat_fields, echo, input_messages
from forkpoint.server.responses.store import Key, ResponseStore, Stored
from forkpoint.server.responses.tools import chat_tools
from forkpoint.server.service import Service
from forkpoint.server.sse import encode
from forkpoint.server.talk import prompt_of
from forkpoint.server.texts import Texts

JSON = "application/json"
T = TypeVar("T")


def prepare_response(texts: Texts, data: bytes, history: bytes | None = None) -> PreparedResponse | str:
    """Runs in a reader's process. The id of the response to go on from, where `history`, its messages, is needed.

    Raises HTTPError or ForkpointError for what is wrong with the request.
    """
    body, note = texts.parse(ResponsesBody, data), texts.notices.add
    if body.previous_response_id is not None and history is None:
        return body.previous_response_id
    if body.background and (body.stream or body.store is False):
        raise HTTPError(400, "a background response is stored and asked for again; leave out stream and store: false")
    conversation = [*_messages_before(history), *input_messages(body, note)]
    tools = chat_tools(body.tools or (), note)
    return PreparedResponse.read(
        texts,
        validated(ChatBody, chat_fields(body, conversation, tools, note)),
        background=bool(body.background),
        called=tools.called,
        conversation=encode(conversation) if body.store is not False else None,
        echo=echo(body),
    )


def count_input_tokens(texts: Texts, data: bytes, history: bytes | None = None) -> CountedTokens | str:
    """Run in a reader's process. Return the id of the response to go on from where `history` is needed."""
    body, note = texts.parse(CountBody, data), texts.notices.add
    if body.previous_response_id is not None and history is None:
        return body.previous_response_id
    conversation = [*_messages_before(history), *input_messages(body, note)]
    chat = validated(ChatBody, chat_fields(body, conversation, chat_tools(body.tools or (), note), note))
    return CountedTokens(input_tokens=len(prompt_of(texts, chat).token_ids))


def _messages_before(history: bytes | None) -> list[dict[str, Any]]:
    """Return the messages of a stored conversation."""
    return [message for line in (history or b"").splitlines() for message in json.loads(line)]


class Responses:
    """The endpoints. A response that is stored is found under the API key that asked for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._store = ResponseStore(config.max_stored_responses, config.max_stored_responses_bytes)

    async def create(self, request: Request) -> Any:
        """Raises HTTPError or ForkpointError before anything is sent."""
        service = self._service
        asked = await self._read(prepare_response, request)
        if asked.background and not self._store.keeps_any:
            raise HTTPError(400, "this server stores no responses, so that none can run in the background")
        key = self._key(f"resp_{service.new_id()}")
        generation = await service.open(key.name, asked, request.receive)
        answer = ResponseAnswer(key.name, asked, generation, service, self._store, key)
        if asked.background:
            self._store.run(key, asyncio.create_task(answer.run()))
            return answer.begin()
        return await answer.send(request)

    async def count(self, request: Request) -> CountedTokens:
        """Count the tokens of a prompt, which need not fit the context."""
        return await self._read(count_input_tokens, request)

    async def compact(self, request: Request) -> Response:
        raise HTTPError(
            400,
            "this server does not compact conversations; ask for a summary with POST /v1/responses, and go on from it",
            code="unsupported",
        )

    async def _read(self, prepare: Callable[..., T | str], request: Request) -> T:
        """Return what `prepare` makes of the body. It is read a second time, with the messages, where it goes on from
        a stored response."""
        service, read = self._service, partial(prepare, history=None)
        async with service.body(request) as data:
            while isinstance(asked := await service.prepare_from(data, read, request), str):
                before = self._stored(asked, status=400)
                if not before.whole:
                    raise HTTPError(
                        400, f"the response {asked!r} has no answer to go on from", param="previous_response_id"
                    )
                read = partial(prepare, history=before.messages)
            return asked

    async def retrieve(self, name: str, request: Request) -> Response:
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise HTTPError(400, "a stored response is told as a whole; leave stream out", param="stream")
        return Response(self._stored(name).reply, media_type=JSON)

    async def cancel(self, name: str) -> Response:
        """End a response that runs in the background; one that has ended stays as it is."""
        self._stored(name)
        await self._store.stop(self._key(name))
        return Response(self._stored(name).reply, media_type=JSON)

    async def delete(self, name: str) -> DeletedReply:
        self._stored(name)
        key = self._key(name)
        await self._store.stop(key)
        self._store.drop(key)
        return DeletedReply(id=name)

    def _key(self, name: str) -> Key:
        """Without keys there is one owner."""
        return Key(KEY.get(), name)

    def _stored(self, name: str, status: int = 404) -> Stored:
        stored = self._store.get(self._key(name))
        if stored is None:
            code = "response_not_found" if status == 404 else "previous_response_not_found"
            raise HTTPError(
                status,
                f"there is no response {name[:80]!r}; stored ones are dropped for newer ones",
                "not_found_error" if status == 404 else "invalid_request_error",
                code=code,
            )
        return stored

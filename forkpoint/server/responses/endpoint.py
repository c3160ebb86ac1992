"""POST /v1/responses, and the operations on stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.middleware import KEY
from forkpoint.server.responses.answer import CountedTokens, DeletedReply, PreparedResponse, ResponseAnswer
from forkpoint.server.responses.body import (
    CountBody,
    Found,
    ResponsesBody,
    Wanted,
    chat_fields,
    conversation_of,
    echo,
    later_tools,
    wanted,
)
from forkpoint.server.responses.event_log import EventLog
from forkpoint.server.responses.input_items import ItemsQuery, ItemsReply, named, page_of_items
from forkpoint.server.responses.store import Key, ResponseStore, Stored
from forkpoint.server.responses.tools import chat_tools
from forkpoint.server.service import Service
from forkpoint.server.sse import EventStream, encode, event
from forkpoint.server.talk import prompt_of
from forkpoint.server.texts import Texts

JSON = "application/json"
STORES_NONE = "this server stores no responses (--max-stored-responses, --max-stored-responses-bytes)"
T = TypeVar("T")


def prepare_response(
    texts: Texts, data: bytes, found: Found | None = None, *, name: str = ""
) -> PreparedResponse | Wanted:
    """Prepare a request. If it refers to stored data, and `found` is None, return the references instead.

    `name` is the id of the response. Runs in a reader's process. Raises HTTPError or ForkpointError if the request is
    wrong.
    """
    body, note = texts.parse(ResponsesBody, data), texts.notices.add
    if found is None and (missing := wanted(body)) is not None:
        return missing
    if body.background and body.store is False:
        raise HTTPError(400, "a background response is stored and asked for again; leave out store: false")
    conversation = conversation_of(body, found)
    tools = chat_tools(body.tools or (), note, later_tools(conversation))
    return PreparedResponse.read(
        texts,
        validated(ChatBody, chat_fields(body, conversation, tools, note)),
        background=bool(body.background),
        seals_reasoning="reasoning.encrypted_content" in (body.include or ()),
        reasoning_part="summary_text" if body.asks_for_summary else "reasoning_text",
        called=tools.called,
        input_items=encode(named(conversation, name)) if body.store is not False else None,
        echo=echo(body),
    )


def count_input_tokens(texts: Texts, data: bytes, found: Found | None = None) -> CountedTokens | Wanted:
    """Count the tokens of a conversation. Returns references, and runs in a reader's process, as `prepare_response`."""
    body, note = texts.parse(CountBody, data), texts.notices.add
    if found is None and (missing := wanted(body)) is not None:
        return missing
    conversation = conversation_of(body, found)
    tools = chat_tools(body.tools or (), note, later_tools(conversation))
    chat = validated(ChatBody, chat_fields(body, conversation, tools, note))
    return CountedTokens(input_tokens=len(prompt_of(texts, chat).token_ids))


class EventsQuery(BaseModel):
    """The query of a stored response: whether its events are streamed, and after which number."""

    stream: bool = False
    starting_after: int = Field(-1, ge=-1)


class Responses:
    """The endpoints. A stored response is found only with the API key that created it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._store = ResponseStore(config.max_stored_responses, config.max_stored_responses_bytes)

    async def create(self, request: Request) -> Any:
        """Answer POST /v1/responses, or store a response and let it run in the background.

        Raises HTTPError or ForkpointError before anything is sent.
        """
        service = self._service
        key = self._key(f"resp_{service.new_id()}")
        prepared = await self._read(partial(prepare_response, name=key.name), request)
        if prepared.background and not self._store.keeps_any:
            text = f"{STORES_NONE}, so none can run in the background; leave it out"
            raise HTTPError(400, text, param="background")
        generation = await service.open(key.name, prepared, request.receive)
        answer = ResponseAnswer(key.name, prepared, generation, service, self._store, key)
        if prepared.background:
            begun = answer.begin()
            self._store.run(key, asyncio.create_task(answer.run()))
            return begun if answer.log is None else self._stream(answer.log, 0)
        return await answer.send(request)

    async def count(self, request: Request) -> CountedTokens:
        """Count the tokens of a prompt, which need not fit the context. Raises HTTPError or ForkpointError."""
        return await self._read(count_input_tokens, request)

    async def compact(self, request: Request) -> Response:
        raise HTTPError(
            400,
            "this server does not compact conversations; ask for a summary with POST /v1/responses, and go on from it",
            code="unsupported",
        )

    async def _read(self, prepare: Callable[..., T | Wanted], request: Request) -> T:
        """Run `prepare` on the body and return the result. Raises as `Service.prepare`.

        If the body refers to stored responses, it is prepared a second time, with the data found in the store.
        """
        service = self._service
        async with service.body(request) as body:
            prepared = await service.prepare_from(body, partial(prepare, found=None), request)
            if isinstance(prepared, Wanted):
                prepared = await service.prepare_from(body, partial(prepare, found=self._find(prepared)), request)
            assert not isinstance(prepared, Wanted)
            return prepared

    def _find(self, missing: Wanted) -> Found:
        """Return the stored data that `missing` refers to. Items that are not stored are left out.

        Raises HTTPError for a response that is not stored, or that has no answer to go on from.
        """
        previous: Stored | None = None
        if missing.response is not None:
            previous = self._stored(missing.response, status=400)
            if not previous.whole:
                text = f"the response {missing.response!r} has no answer to go on from"
                raise HTTPError(400, text, param="previous_response_id")
        with_items = (self._store.with_item(KEY.get(), item) for item in missing.items)
        return Found(previous, tuple({stored: None for stored in with_items if stored is not None}))

    async def retrieve(self, name: str, request: Request) -> Response:
        """Return a stored response, or a stream of its events that come after the number `starting_after`."""
        stored, query = self._stored(name), validated(EventsQuery, dict(request.query_params))
        if not query.stream:
            return Response(stored.reply, media_type=JSON)
        if stored.log is None:
            text = "only a response that was created with background and stream can be streamed; leave stream out"
            raise HTTPError(400, text, param="stream")
        return self._stream(stored.log, query.starting_after + 1)

    def _stream(self, log: EventLog, start: int) -> EventStream:
        """Return a stream of a log's events from the number `start` on. A client that leaves ends the stream alone."""
        interval_s = self._service.config.sse_keep_alive_interval
        return EventStream(log.read(start), lambda: None, lambda error: event(error.body()), interval_s)

    async def input_items(self, name: str, request: Request) -> ItemsReply:
        """Return a page of the items that a stored response answers. They may be large, so a reader reads them."""
        query = validated(ItemsQuery, dict(request.query_params))
        items = self._stored(name).input_items
        with self._service.readers.counted():
            return await self._service.prepare_from((items,), partial(page_of_items, query=query), request)

    async def cancel(self, name: str) -> Response:
        """End a response that runs in the background, and return it. One that has ended stays as it is.

        Raises HTTPError 404 if it is not stored.
        """
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
        """Return the store's key for the response `name`. Without API keys all clients are one owner."""
        return Key(KEY.get(), name)

    def _stored(self, name: str, status: int = 404) -> Stored:
        stored = self._store.get(self._key(name))
        if stored is None:
            why = "stored responses are dropped for newer ones" if self._store.keeps_any else STORES_NONE
            text = f"there is no response {name[:80]!r}; {why}"
            if status == 404:
                raise HTTPError(404, text, "not_found_error", code="response_not_found")
            raise HTTPError(status, text, "invalid_request_error", code="previous_response_not_found")
        return stored

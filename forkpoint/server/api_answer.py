"""The base class of all APIs' answers, and that of OpenAI's two kinds of completion."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from starlette.requests import Request

from forkpoint.server.errors import HTTPError
from forkpoint.server.generation import Generation
from forkpoint.server.sampling import PreparedRequest
from forkpoint.server.service import Service
from forkpoint.server.sse import DONE, EventStream, begin, encode, event, unless_left
from forkpoint.server.texts import Prepare

A = TypeVar("A", bound=PreparedRequest)
NewChoices: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]  # choices, each with other fields of its chunk


@dataclass
class ApiAnswer(ABC, Generic[A]):
    """An API's answer to one request, made from its generation. Read `events` or await `reply`, and only once."""

    prefix: ClassVar[str]  # begins the id of each answer of this API

    name: str
    prepared: A
    generation: Generation
    service: Service
    created_s: int = field(init=False, default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Set up the state of a subclass. Nothing by default."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. Read from the moment that each prompt has an output token.

        Raises HTTPError if a completion fails.
        """

    @abstractmethod
    async def reply(self) -> Any:
        """Return the whole answer: a pydantic model, or a value that becomes JSON. Raises HTTPError if it fails."""

    @abstractmethod
    def error_event(self, error: HTTPError) -> bytes:
        """Return the events that report an error in the middle of a stream and end the stream."""

    async def send(self, request: Request) -> Any:
        """Return the whole answer, or a response that streams it and closes the generation.

        Raises HTTPError or ForkpointError before anything is sent, also if the client leaves; the generation is then
        closed.
        """
        with self.generation.closed_on_error():
            if not self.prepared.stream:
                return await unless_left(request.receive, self.reply())
            wait_s = self.service.config.sse_keep_alive_interval
            events = await begin(request.receive, self.generation.first_news(), self.events(), wait_s)
        return EventStream(events, self.generation.close, self.error_event, wait_s)


async def create(service: Service, prepare: Prepare[A], kind: type[ApiAnswer[A]], request: Request) -> Any:
    """Answer `request`: `prepare` reads its body, `kind` makes the answer.

    Raises HTTPError or ForkpointError before anything is sent.
    """
    return await answered(service, await service.prepare(prepare, request), kind, request)


async def answered(service: Service, prepared: A, kind: type[ApiAnswer[A]], request: Request) -> Any:
    """Answer a prepared request. Raises as `create`."""
    name = kind.prefix + service.new_id()
    answer = kind(name, prepared, await service.open(name, prepared, request.receive), service)
    return await answer.send(request)


class CompletionAnswer(ApiAnswer[A]):
    """An answer of OpenAI's form: chunks that carry choices. A subclass yields the choices."""

    chunk_kind: ClassVar[str]

    @abstractmethod
    def choices(self) -> AsyncIterator[NewChoices]:
        """Yield new parts of choices as they come."""

    def usage(self) -> dict[str, Any]:
        return self.generation.usage()

    def document(self, kind: str, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        return {**self._head(kind), "choices": choices, **others}

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields that all chunks of an answer share."""
        name = self.name
        if self.prepared.request_id is not None:
            name = self.prefix + self.prepared.request_id
        return {"id": name, "object": kind, "created": self.created_s, "model": self.prepared.model}

    def ending(self) -> dict[str, Any]:
        return {"usage": self.usage(), **self.generation.details(), **self.generation.handover()}

    def error_event(self, error: HTTPError) -> bytes:
        return event(error.body()) + DONE

    async def events(self) -> AsyncIterator[bytes]:
        prepared, num_open = self.prepared, len(self.prepared.prompts) * self.prepared.params.n
        before = b"data: " + encode(self._head(self.chunk_kind)).removesuffix(b"}") + b',"choices":['
        async for news in self.choices():
            chunks = []
            for choice, others in news:
                num_open -= choice["finish_reason"] is not None
                if prepared.continuous_usage:
                    others["usage"] = self.usage()
                if num_open == 0 and not prepared.include_usage:
                    others |= self.generation.details() | self.generation.handover()
                after = b"]," + encode(others).removeprefix(b"{") if others else b"]}"
                chunks += [before, encode(choice), after, b"\n\n"]
            yield b"".join(chunks)
        if prepared.include_usage:
            yield event(self.document(self.chunk_kind, [], **self.ending()))
        yield DONE

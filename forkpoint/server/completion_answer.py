"""How an answer is sent, whichever API asked; and what the two of OpenAI's completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import Request

from forkpoint.server.errors import HTTPError
from forkpoint.server.generation import Generation, usage
from forkpoint.server.sampling import SamplingBody
from forkpoint.server.service import Service
from forkpoint.server.sse import DONE, EventStream, begin, event, unless_disconnected
from forkpoint.server.texts import Texts


class Answer(ABC):
    """What an API makes of a generation. Read `events` or await `reply`, once."""

    end: ClassVar[bytes] = b""  # of a stream

    def __init__(self, name: str, generation: Generation) -> None:
        self.name = name
        self.generation = generation

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Asked for the first one once there is news of each prompt."""

    @abstractmethod
    async def reply(self) -> Any:
        """The whole answer: a model, or its JSON."""

    @abstractmethod
    def error_event(self, error: HTTPError) -> bytes:
        """An error in the middle of a stream, and the stream's end."""

    async def send(self, service: Service, request: Request, *, stream: bool) -> Any:
        """Raises HTTPError or ForkpointError before anything is sent."""
        close = self.generation.close
        if not stream:
            return await unless_disconnected(request.receive, self.reply(), close)
        wait_s = service.config.sse_keep_alive_interval
        events = await begin(request.receive, self.generation.first_news(), self.events(), close, wait_s)
        return EventStream(events, close, self.end, self.error_event)


@dataclass(frozen=True, slots=True)
class Telling:
    """How a completion is told. `request_id`: the name that the client has chosen for it."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    returns_ids: bool
    request_id: str | None

    @classmethod
    def of(cls, body: SamplingBody, texts: Texts) -> Telling:
        options = body.stream_options
        return cls(
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage) or texts.config.enable_force_include_usage,
            continuous_usage=bool(options and options.continuous_usage_stats),
            returns_ids=bool(body.return_token_ids),
            request_id=body.request_id,
        )


class CompletionAnswer(Answer):
    """Chunks with choices, of which a subclass knows what they are."""

    end = DONE
    prefix: ClassVar[str]  # of names
    chunk_kind: ClassVar[str]

    def __init__(self, name: str, model: str, telling: Telling, generation: Generation, created_s: int) -> None:
        super().__init__(name if telling.request_id is None else self.prefix + telling.request_id, generation)
        self.telling = telling
        self._model = model
        self._created_s = created_s

    @abstractmethod
    def choices(self) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The news of one choice after the other, each with what its chunk has beside it."""

    def usage(self) -> dict[str, Any]:
        return usage(self.generation.states)

    def document(self, kind: str, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": self._created_s, "model": self._model}
        return {**head, "choices": choices, **others}

    def ending(self) -> dict[str, Any]:
        return {"usage": self.usage(), **self.generation.details()}

    def error_event(self, error: HTTPError) -> bytes:
        return event(error.body()) + DONE

    async def events(self) -> AsyncIterator[bytes]:
        telling, states = self.telling, self.generation.states
        num_open = sum(len(state.completions) for state in states)
        async for choice, others in self.choices():
            num_open -= choice["finish_reason"] is not None
            if telling.continuous_usage:
                others["usage"] = self.usage()
            if num_open == 0 and not telling.include_usage:
                others |= self.generation.details()
            yield event(self.document(self.chunk_kind, [choice], **others))
        if telling.include_usage:
            yield event(self.document(self.chunk_kind, [], **self.ending()))

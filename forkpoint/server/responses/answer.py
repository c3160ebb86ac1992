"""The answer of the Responses API: its output items, the events that report them, and the reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ConfigDict

from forkpoint.checks import json_value
from forkpoint.server.answer import CallPart, Content, Piece, Reasoning
from forkpoint.server.api_answer import ApiAnswer
from forkpoint.server.errors import HTTPError, to_http
from forkpoint.server.logprobs import chat_logprobs, named_by_ids
from forkpoint.server.protocol import ReplyModel
from forkpoint.server.responses.client_tools import CLIENT_TOOLS, ClientTool
from forkpoint.server.responses.event_log import EventLog
from forkpoint.server.responses.store import NAME_TAIL, Key, ResponseStore, Stored
from forkpoint.server.responses.tools import CalledTool
from forkpoint.server.seal import sealed
from forkpoint.server.sse import encode, named_event
from forkpoint.server.talk import Change, PreparedTurn, Talk

SAMPLING: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # what a response says of it


class ResponseReply(ReplyModel):
    """A whole response. `output` is a list of message, reasoning, function_call and custom_tool_call items.

    Many fields of the request are repeated.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class CountedTokens(ReplyModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedReply(ReplyModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def usage_fields(usage: Mapping[str, Any], num_reasoning_tokens: int) -> dict[str, Any]:
    details = usage["prompt_tokens_details"] or {}
    cached, num_image_tokens = details.get("cached_tokens", 0), details.get("image_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0, "image_tokens": num_image_tokens},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse(PreparedTurn):
    """A prepared request for a response.

    `echo`: fields of the request that the response repeats. `input_items`: the conversation as a JSON list of items,
    None if the response is not to be stored. `called`: tools that the client names in another way than the model.
    `seals_reasoning`: reasoning items have `encrypted_content`. `reasoning_part` is the type of the part that has their
    text: `summary_text` for clients that ask for summaries, which show nothing else.
    """

    background: bool
    seals_reasoning: bool
    reasoning_part: Literal["reasoning_text", "summary_text"]
    called: Mapping[str, CalledTool]
    echo: dict[str, Any]
    input_items: bytes | None


@dataclass(frozen=True, slots=True)
class _PartForm:
    """The field of an item that has parts of a kind, and the names of the events about them and about their text."""

    place: str
    index: str
    part_event: str
    text_event: str


_FORMS: Final = {
    "output_text": _PartForm("content", "content_index", "content_part", "output_text"),
    "reasoning_text": _PartForm("content", "content_index", "content_part", "reasoning_text"),
    "summary_text": _PartForm("summary", "summary_index", "reasoning_summary_part", "reasoning_summary_text"),
}


@dataclass
class ResponseAnswer(ApiAnswer[PreparedResponse]):
    """The answer of a turn as a response, which is stored under `key` if the request asks for that."""

    store: ResponseStore
    key: Key

    def __post_init__(self) -> None:
        self._talk = Talk(self.prepared, self.generation, self.service.thread)
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # pieces of the last item's text that are not in the item yet
        self._part: dict[str, Any] = {}  # the last part of an item
        self._num_top = self.prepared.params.logprobs  # None: no log-probabilities
        self._client: ClientTool | None = None  # that of the last call, if it is one
        self._num_events = 0
        self.log: EventLog | None = None  # the events, if the response streams in the background
        self._reply: dict[str, Any] = {
            "id": self.name,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": None,
            "status": "in_progress",
            "model": self.prepared.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **{name: getattr(self.prepared.params, name) for name in SAMPLING},
            **self.prepared.echo,
        }

    async def events(self) -> AsyncIterator[bytes]:
        yield self._event({"type": "response.created", "response": self._reply})
        self._reply["status"] = "in_progress"
        yield self._event({"type": "response.in_progress", "response": self._reply})
        async for data in self._item_events():
            yield self._event(data)
        yield self._event({"type": f"response.{self._reply['status']}", "response": self._reply})

    async def reply(self) -> dict[str, Any]:
        async for _ in self._item_events():
            pass
        return self._reply

    def error_event(self, error: HTTPError) -> bytes:
        self.fail(error)
        return self._event({"type": "response.failed", "response": self._reply})

    def fail(self, error: HTTPError) -> None:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._end("failed", error={"code": code, "message": error.message})

    def begin(self) -> dict[str, Any]:
        """Store the response as queued, and return it. For a response that runs in the background."""
        self._reply["status"] = "queued"
        if self.prepared.stream:
            self.log = EventLog()
        self._keep()
        return self._reply

    async def run(self) -> None:
        """Generate the answer in the background and close the generation; raises nothing.

        The stored response reports the end, whatever it is, and so does the last event of its log.
        """
        log = self.log or EventLog()
        try:
            async for event in self.events():
                if self.log is not None:
                    log.add(event)
        except asyncio.CancelledError:
            self._end("cancelled")
            log.add(self._event({"type": "response.cancelled", "response": self._reply}))
        except Exception as error:
            log.add(self.error_event(to_http(error, "a response in the background")))
        finally:
            self.generation.close()
            log.close()
            self._keep()

    async def _item_events(self) -> AsyncIterator[dict[str, Any]]:
        async for change, piece in self._talk.changes():
            for data in self._apply(change, piece):
                yield data
        if self._talk.end.reason == "length":
            self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            self._end("completed", incomplete_details=None)

    def _apply(self, change: Change, piece: Piece) -> Iterator[dict[str, Any]]:
        """Apply `change` to the items, and yield the events that report it, without sequence numbers.

        An item gets its text when it ends.
        """
        match change, piece:
            case "begins", CallPart(index, name):
                yield self._begin_call(index, name or "")
            case "begins", Reasoning():
                yield self._begin("rs", "reasoning", {"summary": [], "content": []})
                yield self._begin_part({"type": self.prepared.reasoning_part, "text": ""})
            case "begins", Content():
                yield self._begin("msg", "message", {"role": "assistant", "content": []})
                yield self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            case "grows", CallPart(name=name, text=text) if "input" in self._items[-1]:
                if text or name is None:
                    self._texts.append(text)
                    yield self._of_item("custom_tool_call_input.delta", delta=text)
            case "grows", CallPart(text=text) if self._items[-1]["type"] == "function_call":
                self._texts.append(text)
                yield self._of_item("function_call_arguments.delta", delta=text)
            case "grows", CallPart(text=text):
                self._texts.append(text)  # arguments of a tool of OpenAI's, which are read once they are whole
            case "grows", Reasoning(text):
                self._texts.append(text)
                yield self._of_text("delta", delta=text)
            case "grows", Content(text):
                self._texts.append(text)
                logprobs = self._logprobs(piece)
                self._part["logprobs"] += logprobs
                yield self._of_text("delta", delta=text, logprobs=logprobs)
            case status, _:
                self._write_text()
                item = self._items[-1]
                item["status"] = status
                if isinstance(piece, CallPart) and "input" in item:
                    yield self._of_item("custom_tool_call_input.done", input=item["input"])
                elif item["type"] == "function_call":
                    call = {"name": item["name"], "arguments": item["arguments"]}
                    yield self._of_item("function_call_arguments.done", **call)
                elif not isinstance(piece, CallPart):
                    if isinstance(piece, Reasoning) and self.prepared.seals_reasoning:
                        item["encrypted_content"] = sealed(self._part["text"])
                    others = {"logprobs": self._part["logprobs"]} if isinstance(piece, Content) else {}
                    yield self._of_text("done", text=self._part["text"], **others)
                    yield self._of_part("done")
                yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _logprobs(self, content: Content) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of `content`; [] if the request does not ask for them."""
        if self._num_top is None:
            return []
        entries = self._talk.logprobs(content)
        if self.prepared.names_ids:
            entries = [*map(named_by_ids, entries)]
        found: list[dict[str, Any]] = chat_logprobs(entries, self._num_top)["content"]
        return found

    def _write_text(self) -> None:
        """Move the pieces of the text that have come to the last item."""
        text, self._texts = "".join(self._texts), []
        if text:
            item = self._items[-1]
            if item["type"] in ("reasoning", "message"):
                self._part["text"] += text
            elif self._client is not None:
                item[self._client.place] = self._client.value(json_value(text))
            else:
                item["input" if "input" in item else "arguments"] += text

    def _begin(self, prefix: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        number = len(self._items)
        name = f"{prefix}_{self.name[-NAME_TAIL:]}_{number}"
        self._items.append({"id": name, "type": kind, "status": "in_progress", **fields})
        return {"type": "response.output_item.added", "output_index": number, "item": self._items[-1]}

    def _begin_call(self, index: int, name: str) -> dict[str, Any]:
        """Begin the item of a call, with the name that the client knows, and return the event."""
        tool = self.prepared.called.get(name, CalledTool(name))
        call_id = f"call_{self.name[-NAME_TAIL:]}_{index}"
        self._client = client = CLIENT_TOOLS.get(tool.type)
        if client is not None:
            fields = {"call_id": call_id, **client.others, client.place: client.value(None)}
            return self._begin(client.prefix, f"{client.name or tool.type}_call", fields)
        call = {"name": tool.name, "call_id": call_id}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.type == "custom":
            return self._begin("ctc", "custom_tool_call", {**call, "input": ""})
        return self._begin("fc", "function_call", {**call, "arguments": ""})

    def _begin_part(self, part: dict[str, Any]) -> dict[str, Any]:
        self._part = part
        self._items[-1][_FORMS[part["type"]].place].append(part)
        return self._of_part("added")

    def _of_part(self, what: str) -> dict[str, Any]:
        form = _FORMS[self._part["type"]]
        return self._of_item(f"{form.part_event}.{what}", **{form.index: 0}, part=self._part)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return {**place, "type": f"response.{kind}", **fields}

    def _of_text(self, what: str, **fields: Any) -> dict[str, Any]:
        form = _FORMS[self._part["type"]]
        return self._of_item(f"{form.text_event}.{what}", **{form.index: 0}, **fields)

    def _end(self, status: str, **fields: Any) -> None:
        counts = usage_fields(self.generation.usage(), self._talk.num_reasoning_tokens)
        details = self.generation.details() | self.generation.handover()
        self._write_text()
        if self._items and self._items[-1]["status"] == "in_progress":
            self._items[-1]["status"] = "incomplete"  # the response failed or was cancelled within this item
        if status == "completed":
            self._reply["completed_at"] = int(time.time())
        self._reply |= {"status": status, "output": self._items, "usage": counts, **details, **fields}
        self._keep()

    def _keep(self) -> None:
        if self.prepared.input_items is not None:
            whole = self._reply["status"] in ("completed", "incomplete")
            num_bytes = self.log.num_bytes if self.log is not None else 0
            stored = Stored(encode(self._reply), self.prepared.input_items, whole, self.log, num_bytes)
            self.store.put(self.key, stored)

    def _event(self, data: dict[str, Any]) -> bytes:
        event = named_event({**data, "sequence_number": self._num_events})
        self._num_events += 1
        return event

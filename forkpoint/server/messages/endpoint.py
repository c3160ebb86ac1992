"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from forkpoint.checks import json_value
from forkpoint.server.answer import CallPart, Content, Piece, Reasoning
from forkpoint.server.api_answer import ApiAnswer
from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.errors import HTTPError
from forkpoint.server.messages.body import CountTokensBody, MessagesBody, chat_fields
from forkpoint.server.protocol import CacheInfo, ReplyModel, SpeculationInfo
from forkpoint.server.seal import sealed
from forkpoint.server.sse import named_event
from forkpoint.server.talk import Change, News, PreparedTurn, Talk, prompt_of
from forkpoint.server.texts import Texts


class OutputTokensDetails(ReplyModel):
    thinking_tokens: int


class MessageUsage(ReplyModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageReply(ReplyModel):
    """The whole answer. `content` is a list of text, thinking and tool_use blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    cache: CacheInfo | None
    speculation: SpeculationInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CountReply(ReplyModel):
    input_tokens: int


class MessagesErrorInfo(ReplyModel):
    type: str
    message: str
    details: dict[str, Any] | None


class MessagesErrorReply(ReplyModel):
    type: Literal["error"]
    error: MessagesErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMessage(PreparedTurn):
    """A prepared request of this API. `omits_thinking`: thinking blocks have their text only in the signature."""

    omits_thinking: bool


STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def prepare_message(texts: Texts, data: bytes) -> PreparedMessage:
    """Prepare a request from the body `data`. Runs in a reader's process.

    Raises HTTPError or ForkpointError if it is wrong.
    """
    body = texts.parse(MessagesBody, data)
    chat = validated(ChatBody, chat_fields(body, texts.notices.add))
    omits = body.thinking is not None and body.thinking.display == "omitted"
    return PreparedMessage.read(texts, chat, omits_thinking=omits)


def count_tokens(texts: Texts, data: bytes) -> CountReply:
    """Count the tokens of a conversation, which need not fit the context. Runs in a reader's process.

    Raises HTTPError or ForkpointError for a wrong request.
    """
    body = texts.parse(CountTokensBody, data)
    chat = validated(ChatBody, chat_fields(body, texts.notices.add))
    return CountReply(input_tokens=len(prompt_of(texts, chat).token_ids))


class MessageAnswer(ApiAnswer[PreparedMessage]):
    """An answer of Anthropic's API, as a list of content blocks."""

    prefix = "msg_"

    def __post_init__(self) -> None:
        self._talk = Talk(self.prepared, self.generation, self.service.thread)
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # parts of the open block's text, or of the JSON of its input
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def reply(self) -> MessageReply:
        async for _ in self._block_events():
            pass
        return MessageReply.model_validate(self._message(self._blocks))

    async def events(self) -> AsyncIterator[bytes]:
        yield named_event({"type": "message_start", "message": self._message([])})
        async for data in self._block_events():
            yield named_event(data)
        details = self.generation.details()
        yield named_event({"type": "message_delta", "delta": self._ending, "usage": self._usage(), **details})
        yield named_event({"type": "message_stop"})

    def error_event(self, error: HTTPError) -> bytes:
        return named_event(error.messages_body())

    async def _block_events(self) -> AsyncIterator[dict[str, Any]]:
        async for change, piece in self._talk.changes():
            for data in self._apply(change, piece):
                yield data
        self._ending = self._ended(self._talk.end)

    def _apply(self, change: Change, piece: Piece) -> Iterator[dict[str, Any]]:
        """Apply `change` to the blocks, and yield the events that report it.

        The open block gets its text or its input when it ends.
        """
        match change, piece:
            case "begins", Reasoning():
                yield self._begin({"type": "thinking", "thinking": "", "signature": ""})
            case "begins", Content():
                yield self._begin({"type": "text", "text": ""})
            case "begins", CallPart(index, name):
                call = f"toolu_{self.name[-12:]}_{index}"
                yield self._begin({"type": "tool_use", "id": call, "name": name, "input": {}})
            case "grows", Reasoning(text):
                self._texts.append(text)
                if not self.prepared.omits_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case "grows", Content(text):
                self._texts.append(text)
                yield self._delta({"type": "text_delta", "text": text})
            case "grows", CallPart(text=text):
                self._texts.append(text)
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                block, text = self._blocks[-1], "".join(self._texts)
                if isinstance(piece, CallPart):
                    block["input"] = _whole_arguments(text)
                elif isinstance(piece, Reasoning):
                    # Clients take a block without a signature for text, so one that shows its text has an empty seal.
                    shown, hidden = ("", text) if self.prepared.omits_thinking else (text, "")
                    block |= {"thinking": shown, "signature": sealed(hidden)}
                    yield self._delta({"type": "signature_delta", "signature": block["signature"]})
                else:
                    block["text"] = text
                yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._texts = []
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _ended(self, news: News) -> dict[str, Any]:
        """Return why the answer ended: stop_reason and stop_sequence.

        An answer with a call ends with `tool_use`, even if its turn ended with `stop`: that is OpenAI's reason if the
        request named the function to call.
        """
        if news.reason == "stop" and isinstance(news.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": news.stop_reason}
        reason = news.reason
        if reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_calls"
        return {"stop_reason": STOP_REASONS[reason or "stop"], "stop_sequence": None}

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.name, "type": "message", "role": "assistant", "model": self.prepared.model}
        counts = {"usage": self._usage(), **self.generation.details()}
        return {**head, "content": blocks, **self._ending, **counts, **self.generation.handover()}

    def _usage(self) -> dict[str, Any]:
        """Return token counts with Anthropic's names. Unlike OpenAI's, `input_tokens` leaves cached tokens out."""
        usage = self.generation.usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._talk.num_reasoning_tokens},
        }


def _whole_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: an empty one if the call was cut off or they are not an object."""
    value = json_value(text)
    return value if isinstance(value, dict) else {}

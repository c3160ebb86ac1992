"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from forkpoint.server.answer import CallPart, Content, Reasoning
from forkpoint.server.api_answer import CompletionAnswer, NewChoices
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, named_by_ids, prompt_logprobs
from forkpoint.server.protocol import CacheInfo, CompletionUsage, ReplyModel, SpeculationInfo
from forkpoint.server.talk import News, PreparedTurn, Reason, Talk
from forkpoint.server.texts import Texts

TEXTS: Final = {"function": "arguments", "custom": "input"}  # for each kind of call, the field with its text


class FunctionCall(ReplyModel):
    name: str
    arguments: str


class ToolCall(ReplyModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(ReplyModel):
    name: str
    input: str


class CustomToolCall(ReplyModel):
    id: str
    type: Literal["custom"] = "custom"
    custom: CustomCall


class AnswerMessage(ReplyModel):
    """The message of an answer. `reasoning` and `reasoning_content` are equal; clients expect one or the other.

    `refusal` is always null: OpenAI's documents require the field.
    """

    role: str
    content: str | None = None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChoice(ReplyModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | Literal["function_call"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatReply(ReplyModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    cache: CacheInfo | None
    speculation: SpeculationInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat(PreparedTurn):
    """A prepared chat completion. `has_functions`: its answer has a `function_call` instead of `tool_calls`."""

    has_functions: bool


def prepare_chat(texts: Texts, data: bytes) -> PreparedChat:
    """Prepare a chat completion from the body `data`. Runs in a reader's process.

    Raises HTTPError or ForkpointError for a wrong request, and MissingImages.
    """
    body = texts.parse(ChatBody, data)
    return PreparedChat.read(texts, body, has_functions=bool(body.functions))


class ChatAnswer(CompletionAnswer[PreparedChat]):
    prefix = "chatcmpl-"
    chunk_kind = "chat.completion.chunk"

    def __post_init__(self) -> None:
        self._talk = Talk(self.prepared, self.generation, self.service.thread)
        self._role = self.service.config.response_role
        self._kinds: dict[int, str] = {}  # for each choice, the kind of its last call

    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": self._talk.num_reasoning_tokens}
        return {**super().usage(), "completion_tokens_details": details}

    async def choices(self) -> AsyncIterator[NewChoices]:
        delta = {"role": self._role, "content": ""}
        for index in range(self.prepared.params.n):
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield [(first, {"cache": self.generation.cache_info(), **self._prompt_ids()})]
        async for news in self._talk.news():
            yield [(self._choice(part), {}) for part in news.parts()]

    async def reply(self) -> ChatReply:
        choices = [self._choice(news) async for news in self._talk.news(whole=True)]
        choices.sort(key=lambda choice: choice["index"])
        for choice in choices:
            choice["message"] = self._message(choice["delta"])
        prompt = {"prompt_logprobs": prompt_logprobs(self.generation.states[0]), **self._prompt_ids()}
        return ChatReply.model_validate(self.document("chat.completion", choices, **self.ending(), **prompt))

    def _choice(self, news: News) -> dict[str, Any]:
        """Return `news` as the choice of a chunk."""
        reason = "function_call" if news.reason == "tool_calls" and self.prepared.has_functions else news.reason
        choice = {"index": news.index, "delta": self._delta(news), "logprobs": None, "finish_reason": reason}
        num_top = self.prepared.params.logprobs
        if num_top is not None:
            named = map(named_by_ids, news.logprobs) if self.prepared.names_ids else news.logprobs
            choice["logprobs"] = chat_logprobs(list(named), num_top)
        if news.reason is not None:
            choice["stop_reason"] = news.stop_reason
        if self.prepared.returns_ids:
            choice["token_ids"] = news.token_ids
        return choice

    def _delta(self, news: News) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for piece in news.pieces:
            match piece:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
                case CallPart(_, name, arguments) if self.prepared.has_functions:
                    function = delta.setdefault("function_call", {} if name is None else {"name": name})
                    function["arguments"] = function.get("arguments", "") + arguments
                case CallPart(index, name, text):
                    calls = delta.setdefault("tool_calls", [])
                    if name is not None:
                        self._kinds[news.index] = kind = "custom" if name in self.prepared.customs else "function"
                        call = {"id": f"call_{self.name[-12:]}_{news.index}_{index}", "type": kind}
                        calls.append({"index": index, **call, kind: {"name": name, TEXTS[kind]: text}})
                    else:
                        kind = self._kinds[news.index]
                        if not calls:
                            calls.append({"index": index, kind: {TEXTS[kind]: ""}})
                        calls[-1][kind][TEXTS[kind]] += text
        return delta

    def _message(self, delta: dict[str, Any]) -> dict[str, Any]:
        nothing = None if delta.keys() - {"content"} else ""
        return {"role": self._role, **delta, "content": delta.get("content") or nothing}

    def _prompt_ids(self) -> dict[str, list[int]]:
        """Return the field with the prompt's token ids if the request asks for it, otherwise {}."""
        prepared = self.prepared
        return {"prompt_token_ids": prepared.prompts[0].token_ids.tolist()} if prepared.returns_ids else {}

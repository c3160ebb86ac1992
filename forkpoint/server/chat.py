"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from forkpoint.outputs import Logprob
from forkpoint.server.answer import CallPart, Content, Piece, Reasoning
from forkpoint.server.body import parse
from forkpoint.server.completion_answer import CompletionAnswer
from forkpoint.server.generation import Generation
from forkpoint.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from forkpoint.server.protocol import CacheInfo, Reply, SpeculationInfo, Usage
from forkpoint.server.service import Service
from forkpoint.server.talk import ChatBody, News, Reason, Talk, Turn, ask
from forkpoint.server.texts import Texts


class FunctionCall(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(Reply):
    """`reasoning` and `reasoning_content` are two names of the same thing, each with its clients."""

    role: str
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Reply):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatReply(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    cache: CacheInfo | None
    speculation: SpeculationInfo | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


def prepare_chat(texts: Texts, data: bytes) -> Turn:
    """Runs in a reader's process. Raises HTTPError or ForkpointError for what is wrong with the request."""
    return ask(texts, parse(ChatBody, data))


class _Choice:
    """One completion of a chat, and what of it has not been told yet."""

    def __init__(self, index: int, name: str, num_top: int | None) -> None:
        self.started = False
        self._index = index
        self._name = name
        self._num_top = num_top
        self._pieces: list[Piece] = []
        self._ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []

    def hold(self, news: News) -> None:
        self._pieces += news.pieces
        self._ids += news.delta.token_ids
        self._logprobs += news.delta.logprobs or ()

    def told(self, news: News, *, returns_ids: bool) -> dict[str, Any]:
        """All that is held, as the choice of a chunk."""
        told = {"index": self._index, "delta": self._delta(), "logprobs": None, "finish_reason": news.reason}
        if self._num_top is not None:
            told["logprobs"] = chat_logprobs(self._logprobs, self._num_top)
        if news.reason is not None:
            told["stop_reason"] = news.delta.stop_reason
        if returns_ids:
            told["token_ids"] = self._ids
        self._pieces, self._ids, self._logprobs = [], [], []
        return told

    def _delta(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for piece in self._pieces:
            match piece:
                case Content(text):
                    told["content"] = told.get("content", "") + text
                case Reasoning(text):
                    told["reasoning"] = told["reasoning_content"] = told.get("reasoning", "") + text
                case CallPart(index, name, arguments):
                    calls = told.setdefault("tool_calls", [])
                    if name is not None:
                        function = {"name": name, "arguments": arguments}
                        call = {"id": f"call_{self._name}_{self._index}_{index}", "type": "function"}
                        calls.append({"index": index, **call, "function": function})
                    elif calls:
                        calls[-1]["function"]["arguments"] += arguments
                    else:
                        calls.append({"index": index, "function": {"arguments": arguments}})
        return told


class ChatAnswer(CompletionAnswer[Turn]):
    prefix = "chatcmpl-"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, name: str, asked: Turn, generation: Generation, service: Service) -> None:
        super().__init__(name, asked, generation, service)
        self._talk = Talk(asked, generation)
        self._role = service.config.response_role
        self._choices = [_Choice(index, name[-12:], asked.params.logprobs) for index in range(asked.params.n)]

    async def choices(self) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
        async for news in self._talk.news():
            index = news.delta.index
            choice = self._choices[index]
            choice.hold(news)
            if not choice.started:
                choice.started = True
                delta = {"role": self._role, "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield first, {"cache": self.generation.cache_info(), **self._prompt_ids()}
            if news.pieces or news.reason is not None:
                yield choice.told(news, returns_ids=self.asked.telling.returns_ids), {}

    async def reply(self) -> ChatReply:
        made: dict[int, dict[str, Any]] = {}
        async for news in self._talk.news():
            choice = self._choices[news.delta.index]
            choice.hold(news)
            if news.reason is not None:
                told = choice.told(news, returns_ids=self.asked.telling.returns_ids)
                made[news.delta.index] = {**told, "message": self._message(told["delta"])}
        prompt = {"prompt_logprobs": prompt_logprobs(self.generation.states[0]), **self._prompt_ids()}
        choices = [made[index] for index in sorted(made)]
        return ChatReply.model_validate(self.document("chat.completion", choices, **self.ending(), **prompt))

    def _message(self, delta: dict[str, Any]) -> dict[str, Any]:
        nothing = None if delta.keys() - {"content"} else ""
        return {"role": self._role, **delta, "content": delta.get("content") or nothing}

    def _prompt_ids(self) -> dict[str, list[int]]:
        """For who asks for them."""
        asked = self.asked
        return {"prompt_token_ids": asked.prompts[0].token_ids.tolist()} if asked.telling.returns_ids else {}

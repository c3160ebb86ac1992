"""A turn of a conversation, shared by all chat APIs: preparing it, and reading its answer in pieces.

Bodies of the other APIs are translated to that of a chat completion first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

from forkpoint.engine.inputs import Prompt
from forkpoint.outputs import CompletionOutput, Logprob
from forkpoint.params import THINK, THINK_END, FinishReason, SamplingParams, Thinking
from forkpoint.server.answer import AnswerParser, CallPart, Content, Piece, Reasoning, with_unopened_reasoning
from forkpoint.server.chat.body import ChatBody, ChatMessage, FunctionChoice
from forkpoint.server.chat.held_calls import constraint_of
from forkpoint.server.chat.history import shown_messages
from forkpoint.server.chat.tools import customs_of, plan_tools
from forkpoint.server.custom_tools import CustomCalls
from forkpoint.server.errors import HTTPError
from forkpoint.server.generation import Generation
from forkpoint.server.sampling import PreparedRequest, sampling_params
from forkpoint.server.texts import Texts

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")
# Characters that are read on the event loop at once. Reading takes up to 10 us a character, and text that was held back
# may be read several times.
MAX_ON_LOOP: Final = 256
Change: TypeAlias = Literal["begins", "grows", "completed", "incomplete"]


def template_variables(body: ChatBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template.

    `chat_template_kwargs` override the request's other fields, which override the server's `defaults`.
    """
    variables = dict(defaults)
    if body.documents is not None:
        variables["documents"] = body.documents
    variables |= body.thinking_variables(body.thinking)
    return variables | (body.chat_template_kwargs or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn(PreparedRequest):
    """A prepared request of a chat API.

    `parser` creates the parser of an answer's text. `customs` are the names of custom tools. `writes_text`: the
    answer is the text of a custom tool's call. `names_call`: the request names the function to call.
    `reports_reasoning`: the answer may contain reasoning.
    """

    parser: Callable[[], AnswerParser]
    customs: frozenset[str]
    writes_text: bool
    names_call: bool
    reports_reasoning: bool

    @classmethod
    def read(cls, texts: Texts, body: ChatBody, **others: Any) -> Self:
        """Prepare a chat completion, with the fields `others` of a subclass. Runs in a reader's process.

        Raises HTTPError or ForkpointError if the request is wrong, and MissingImages for images to be fetched first.
        """
        model = texts.served_name(body.model)
        plan = plan_tools(texts, body)
        constraint = constraint_of(texts, body, plan)
        params = sampling_params(
            body,
            texts,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured=constraint.structured,
        )
        prompt = _render(texts, body, plan.shown, params)
        thinking = _thinking(texts, body, prompt, params)
        notation = texts.notation
        schemas = plan.schemas
        if not plan.forced and texts.config.tool_call_parser == "none":
            schemas = None
        tags = [notation.opening] * (schemas is not None) + [THINK, THINK_END] * (thinking != "none")
        shows_tags = texts.tokenizer is not None and any(map(texts.tokenizer.is_special, tags))
        skips = params.skip_special_tokens and not shows_tags
        openings: tuple[str, ...] = ()
        if body.response_format is not None and schemas is not None and not plan.forced:
            openings = (notation.opening, *notation.tags)
        params = replace(
            params,
            thinking=thinking,
            thinking_token_budget=body.thinking_token_budget,
            thinking_end=texts.thinking_end,
            call_openings=openings,
            calls=constraint.calls,
            skip_special_tokens=skips,
        )
        parser = partial(
            AnswerParser,
            reasoning=thinking != "none",
            starts_inside=thinking == "open",
            tools=schemas,
            notation=notation,
            forced=plan.forced,
            written=plan.written,
            single=plan.single,
        )
        return cls.of(
            body,
            texts,
            model=model,
            prompts=(replace(prompt, text=None),),
            params=params,
            parser=parser,
            customs=customs_of(body),
            writes_text=plan.written is not None,
            names_call=isinstance(body.tool_choice, FunctionChoice),
            reports_reasoning=body.reports_reasoning,
            **others,
        )


def _thinking(texts: Texts, body: ChatBody, prompt: Prompt, params: SamplingParams) -> Thinking:
    """Return whether the answer begins with thinking: "none", "open" (the prompt began it) or "optional"."""
    if texts.config.reasoning_parser == "none":
        return "none"
    begun = (prompt.text or "").rstrip()
    if begun.endswith(THINK) or (body.continue_final_message and _ends_in_thinking(body.messages[-1])):
        return "open"
    # A grammar allows thinking only if it is expected, so under a grammar the model must be able to think.
    is_over = begun.endswith(THINK_END) or body.continue_final_message or not texts.may_think
    if params.structured_outputs is not None and is_over:
        return "none"
    return "optional"


def _ends_in_thinking(message: ChatMessage) -> bool:
    """Return whether the last `<think>` of a message is not closed."""
    parts = message.content if isinstance(message.content, list) else [{"text": message.content}]
    text = "".join(str(part.get("text") or "") for part in parts)
    return text.rfind(THINK) > text.rfind(THINK_END)


def prompt_of(texts: Texts, body: ChatBody) -> Prompt:
    """Return the prompt of a chat completion. Its tokens may be more than fit the context.

    Raises InvalidPromptError for far too long texts, HTTPError for a wrong request, MissingImages for images that have
    to be fetched first, and the errors of `ChatTemplate.render`.
    """
    texts.served_name(body.model)
    return _render(texts, body, plan_tools(texts, body).shown, None)


def _render(texts: Texts, body: ChatBody, tools: list[dict[str, Any]] | None, params: SamplingParams | None) -> Prompt:
    carry_on = bool(body.continue_final_message)
    if carry_on and body.add_generation_prompt:
        raise HTTPError(400, "continue_final_message and add_generation_prompt exclude each other")
    generate = body.add_generation_prompt
    if generate is None:
        generate = not carry_on
    return texts.render(
        shown_messages(
            body.messages,
            texts.notices.add,
            tools=body.tools or (),
            drops_billing_lines=texts.config.drop_billing_lines,
            shows_images=texts.images is not None,
        ),
        params,
        tools=tools,
        add_generation_prompt=generate,
        continue_final_message=carry_on,
        variables=template_variables(body, texts.config.default_chat_template_kwargs),
        mm_processor_kwargs=body.mm_processor_kwargs,
        media_io_kwargs=body.media_io_kwargs,
    )


@dataclass(slots=True)
class News:
    """New parts of one completion: pieces that became certain, tokens since the last news, and why it ended, if so."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    reason: Reason | None = None
    stop_reason: str | int | None = None

    def parts(self) -> list[News]:
        """Return the news in order, each with pieces of one kind and of one call. The first has all the tokens.

        Some clients read only the first call of a chunk, or either its reasoning or its content.
        """
        runs = [list(run) for _, run in groupby(self.pieces, _kind)]
        if len(runs) < 2:
            return [self]
        first = replace(self, pieces=runs[0], reason=None, stop_reason=None)
        last = replace(self, pieces=runs[-1], token_ids=[], logprobs=[])
        return [first, *(News(self.index, run) for run in runs[1:-1]), last]


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    """Return the kind of a piece, and of a call its number too."""
    return type(piece), piece.index if isinstance(piece, CallPart) else 0


def _parsed(parser: AnswerParser, delta: CompletionOutput) -> list[Piece]:
    pieces = parser.feed(delta.text) if delta.text else []
    if delta.finish_reason is not None:
        pieces += parser.finish(cut=delta.finish_reason is FinishReason.LENGTH)
    return pieces


class Talk:
    """The answer of a turn as it comes. Read either `news` or `changes`, once, to the end or until it is closed."""

    def __init__(self, turn: PreparedTurn, generation: Generation, thread: Executor) -> None:
        """Read the answer on the event loop, but text that was held back for long in `thread`."""
        self.end = News(0)  # the last news of a turn with one completion
        self._thread = thread
        self._turn = turn
        self._generation = generation
        self._parsers = [turn.parser() for _ in range(turn.params.n)]
        self._customs = [CustomCalls(() if turn.writes_text else turn.customs) for _ in self._parsers]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of all completions whose text begins where the model was thinking."""
        (state,) = self._generation.states
        return sum(
            len(completion.tokens_in(positions))
            for completion, parser in zip(state.completions, self._parsers, strict=True)
            for positions in parser.reasoning()
        )

    def logprobs(self, content: Content) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of the tokens whose text begins within `content`, of a single completion."""
        [completion] = self._generation.states[0].completions
        return [entry for positions in content.positions for entry in completion.logprobs_in(positions)]

    async def news(self, *, whole: bool = False) -> AsyncIterator[News]:
        """Yield news until all completions have ended, then close the generation.

        `whole`: yield each completion once, at its end. Raises HTTPError if a completion fails.
        """
        held = {index: News(index) for index in range(len(self._parsers))}
        try:
            async for deltas in self._generation.deltas():
                for _, delta in deltas:
                    if (news := await self._take(held, delta, whole)) is not None:
                        yield news
                if not held:
                    break
        finally:
            self._generation.close()  # if one completion failed, this ends the others

    async def _take(self, held: dict[int, News], delta: CompletionOutput, whole: bool) -> News | None:
        """Add a delta to the news of its completion. Return them, and hold them no longer, if they can be yielded."""
        news = held.get(delta.index)
        if news is None:
            return None  # the answer ended with its first call, while the engine still generates
        await self._read(delta, news)
        if news.reason is not None:
            if whole:
                news.pieces = await self._run(len(news.pieces), self._whole, news)
            del held[delta.index]
            return news
        if whole or not news.pieces:
            return None
        held[delta.index] = News(delta.index)
        return news

    async def changes(self) -> AsyncIterator[tuple[Change, Piece]]:
        """Yield changes of the parts of a single completion: stretches of reasoning or content, and calls.

        A part begins with a piece, grows with this and further pieces, and ends completed. The last part is incomplete
        if the length limit ended the answer.
        """
        last: Piece | None = None
        async for news in self.news():
            for piece in news.pieces:
                names_call = isinstance(piece, CallPart) and piece.name is not None
                if names_call or type(piece) is not type(last):
                    if last is not None:
                        yield "completed", last
                    yield "begins", piece
                last = piece
                yield "grows", piece
            self.end = news
        if last is not None:
            yield "incomplete" if self.end.reason == "length" else "completed", last

    async def _read(self, delta: CompletionOutput, news: News) -> None:
        parser = self._parsers[delta.index]
        pieces = await self._run(parser.num_held + len(delta.text), _parsed, parser, delta)
        news.reason, news.stop_reason = self._reason(parser, delta), delta.stop_reason
        pieces = self._customs[delta.index].pieces(pieces, is_last=news.reason is not None)
        news.pieces += self._reported(pieces)
        news.token_ids += delta.token_ids
        news.logprobs += delta.logprobs or ()

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns. Large work runs in the thread, so that other requests are served meanwhile."""
        if size <= MAX_ON_LOOP:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))

    def _whole(self, news: News) -> list[Piece]:
        """Return the pieces of a whole completion, joined, without reasoning that is not reported.

        Content before a `</think>` that nothing has opened becomes reasoning.
        """
        num = self._parsers[news.index].num_unopened
        return self._reported(with_unopened_reasoning(news.pieces, num))

    def _reported(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces without reasoning that is not reported."""
        return [piece for piece in pieces if self._turn.reports_reasoning or not isinstance(piece, Reasoning)]

    def _reason(self, parser: AnswerParser, delta: CompletionOutput) -> Reason | None:
        """Return why the completion ended; None if it has not. As at OpenAI, a named function ends it with `stop`."""
        if parser.done:
            return "tool_calls"
        if delta.finish_reason is None:
            return None
        if delta.finish_reason is FinishReason.LENGTH:
            return "length"
        if parser.num_calls and not self._turn.names_call:
            return "tool_calls"
        return "stop"

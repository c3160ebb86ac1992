"""Sends a workload and collects the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from forkpoint.bench.request import BenchRequest
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.client.answer import Answer
from forkpoint.client.server import Server
from forkpoint.errors import ServerError

Prompt: TypeAlias = Any  # token ids or a text for a plain completion, messages for a chat


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request. `error` is None if it was answered; otherwise `answer` may be cut short or empty."""

    request: BenchRequest
    answer: Answer
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token with visible text (half a character has none), or to the end if none had any."""
        first = self.answer.time_to_first_token_s
        if first is None:
            return self.answer.latency_s
        return first

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token or none."""
        later = self.answer.num_completion_tokens - 1
        if later <= 0:
            return None
        return (self.answer.latency_s - self.ttft_s) / later

    @property
    def num_prompt_tokens(self) -> int:
        if self.answer.usage is None:
            return self.request.num_content_tokens
        return self.answer.usage.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        """The prompt tokens that the server took from its cache; None if it does not say."""
        if self.answer.usage is None:
            return None
        return self.answer.usage.num_cached_tokens

    def meets(self, limits_ms: Mapping[str, float]) -> bool:
        """Return whether each metric (ttft, tpot, e2el) keeps its limit; a missing tpot keeps any."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.answer.latency_s}
        found = {name: values[name] for name in limits_ms}
        return all(value is None or value * 1000 <= limits_ms[name] for name, value in found.items())


class PromptStyle:
    """Builds prompts of plain completions. Conversations are lists of token ids (a text has no continuation)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def prompt(self, request: BenchRequest, before: Prompt | None) -> Prompt:
        """Return the prompt of `request` after `before`, its conversation so far (None: it starts one)."""
        own = request.content if isinstance(request.content, str) else request.content.tolist()
        return own if before is None else before + own

    def answered(self, prompt: Prompt, answer: str) -> Prompt:
        """Return the conversation after `prompt` was answered with the text `answer`."""
        return prompt + self._vocabulary.encode(answer)

    def body(self, prompt: Prompt, num_output_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": num_output_tokens}


class ChatStyle(PromptStyle):
    """Builds chats: conversations are lists of messages, and token ids become a text that encodes to as many tokens."""

    def prompt(self, request: BenchRequest, before: Prompt | None) -> Prompt:
        own: Any = request.content if isinstance(request.content, str) else self._vocabulary.text(request.content)
        if request.images:
            images = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
            own = [{"type": "text", "text": own}, *images]
        return [*(before or ()), {"role": "user", "content": own}]

    def answered(self, prompt: Prompt, answer: str) -> Prompt:
        return [*prompt, {"role": "assistant", "content": answer}]

    def body(self, prompt: Prompt, num_output_tokens: int) -> dict[str, Any]:
        return {"messages": prompt, "max_completion_tokens": num_output_tokens}


STYLES: Final[Mapping[str, type[PromptStyle]]] = MappingProxyType({"openai": PromptStyle, "openai-chat": ChatStyle})


@dataclass
class Load:
    """Sends each request to `path` when it is due: at its arrival time, or after the request that it follows.

    `body` holds the fields that all requests share. `on_end` is called with each outcome. At most `max_concurrency`
    requests are in flight (None: any number).
    """

    server: Server
    path: str
    style: PromptStyle
    body: Mapping[str, Any]
    max_concurrency: int | None = None
    on_end: Callable[[Outcome], object] = lambda outcome: None

    def __post_init__(self) -> None:
        self._slots = nullcontext() if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)

    async def run(self, requests: Sequence[BenchRequest], arrivals: Sequence[float]) -> list[Outcome]:
        """Send all `requests` and return their outcomes in the same order.

        Request i is due `arrivals[i]` seconds after this call, unless it follows another one. A request that follows a
        failed one fails without being sent. Errors of the server are outcomes and are not raised.
        """
        start = time.perf_counter()
        followed = {request.after for request in requests if request.continues}
        tasks: list[asyncio.Task[tuple[Outcome, Prompt]]] = []
        for index, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
            before = tasks[request.after] if request.after is not None else None
            tasks.append(asyncio.create_task(self._one(request, start + arrival, before, index in followed)))
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [outcome for outcome, _ in ended]

    async def _one(
        self, request: BenchRequest, due: float, before: asyncio.Task[tuple[Outcome, Prompt]] | None, followed: bool
    ) -> tuple[Outcome, Prompt]:
        history: Prompt = None
        if before is None:
            await asyncio.sleep(due - time.perf_counter())
        else:
            previous, history = await asyncio.shield(before)
            if previous.error is not None:
                return self._ended(Outcome(request, Answer(), "the request before it failed")), None
            await asyncio.sleep(request.think_s)
        async with self._slots:
            prompt = self.style.prompt(request, history if request.continues else None)
            outcome = await self._send(request, prompt)
        kept = self.style.answered(prompt, outcome.answer.text) if followed else None
        return self._ended(outcome), kept

    async def _send(self, request: BenchRequest, prompt: Prompt) -> Outcome:
        body = {**self.body, **self.style.body(prompt, request.num_output_tokens)}
        answer = Answer()
        try:
            async for _ in answer.read(self.server.stream(self.path, body)):
                pass
        except ServerError as error:
            return Outcome(request, answer, str(error))
        if answer.first_token_s is None and not answer.num_completion_tokens:
            return Outcome(request, answer, "the answer has no token")
        return Outcome(request, answer)

    def _ended(self, outcome: Outcome) -> Outcome:
        self.on_end(outcome)
        return outcome

"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from forkpoint.outputs import CompletionOutput, Logprob
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.server.api_answer import CompletionAnswer, NewChoices
from forkpoint.server.completions.body import NO_LIMIT, CompletionBody
from forkpoint.server.logprobs import (
    PromptLogprobs,
    TextLogprobs,
    named_by_ids,
    prompt_logprobs,
    prompt_starts,
    text_logprobs,
)
from forkpoint.server.protocol import CacheInfo, CompletionUsage, ReplyModel, SpeculationInfo
from forkpoint.server.sampling import PreparedRequest, sampling_params, structured_outputs
from forkpoint.server.texts import Texts

DEFAULT_MAX_TOKENS: Final = 16  # as in OpenAI's API
Entry: TypeAlias = tuple[str, dict[int, Logprob] | None]  # a token's text, and its alternatives if there are any


class CompletionChoice(ReplyModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionReply(ReplyModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    cache: CacheInfo | None
    speculation: SpeculationInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion(PreparedRequest):
    """A prepared text completion.

    `echoed`: the texts of the prompts if the answers begin with them. `first_tokens`: the bytes of each prompt's
    first token if prompts are echoed with log-probabilities. `drops_output`: the request is about the prompts alone
    (max_tokens 0); the engine still generates a token, which is dropped.
    """

    echoed: tuple[str, ...] | None
    first_tokens: tuple[bytes, ...]
    drops_output: bool
    reports_prompt_logprobs: bool


def prepare_completion(texts: Texts, data: bytes) -> PreparedCompletion:
    """Prepare a text completion from the body `data`. Runs in a reader's process.

    Raises HTTPError or ForkpointError for a wrong request.
    """
    body = texts.parse(CompletionBody, data)
    model = texts.served_name(body.model)
    params = _params(texts, body)
    special = body.add_special_tokens is not False
    split = _split(body.prompt)
    texts.room.check(len(split) * params.n)
    prompts = [texts.prompt(given, params, special=special) for given in split]
    echoed: tuple[str, ...] | None = None
    first_tokens: tuple[bytes, ...] = ()
    if body.echo:
        all_ids = [prompt.token_ids.tolist() for prompt in prompts]
        echoed = tuple(
            prompt.text if prompt.text is not None and not prompt.num_dropped else texts.text_of(ids)
            for prompt, ids in zip(prompts, all_ids, strict=True)
        )
        if body.logprobs is not None:
            tokenizer = texts.require_tokenizer()
            first_tokens = tuple(tokenizer.token_bytes(ids[0]) for ids in all_ids)
    return PreparedCompletion.of(
        body,
        texts,
        model=model,
        prompts=tuple(replace(prompt, text=None) for prompt in prompts),
        params=params,
        echoed=echoed,
        first_tokens=first_tokens,
        drops_output=body.max_tokens == 0,
        reports_prompt_logprobs=body.prompt_logprobs is not None,
    )


def _params(texts: Texts, body: CompletionBody) -> SamplingParams:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    wanted = [body.prompt_logprobs]
    if body.echo:
        wanted.append(body.logprobs)
    return sampling_params(
        body,
        texts,
        # The engine generates at least one token. For max_tokens 0 it is dropped.
        max_tokens=None if limit == NO_LIMIT else max(limit, 1),
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in wanted if count is not None), default=None),
        structured=structured_outputs(texts, body),
    )


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return list(prompt)
    return [prompt]  # type: ignore[list-item]


class TextAnswer(CompletionAnswer[PreparedCompletion]):
    prefix = "cmpl-"
    chunk_kind = "text_completion"

    def __post_init__(self) -> None:
        self._num_reported: dict[int, int] = {}  # by choice: tokens whose log-probabilities are reported

    async def choices(self) -> AsyncIterator[NewChoices]:
        async for deltas in self.generation.deltas():
            yield [(self._choice(number, delta), {}) for number, delta in deltas]

    async def reply(self) -> CompletionReply:
        news = [delta async for deltas in self.generation.deltas(whole=True) for delta in deltas]
        choices = [self._choice(number, delta) for number, delta in news]
        choices.sort(key=lambda choice: choice["index"])
        return CompletionReply.model_validate(self.document(self.chunk_kind, choices, **self.ending()))

    def usage(self) -> dict[str, Any]:
        return self.generation.usage(counts_output=not self.prepared.drops_output)

    def _choice(self, number: int, delta: CompletionOutput) -> dict[str, Any]:
        """Return `delta` of prompt `number` as the choice of a chunk.

        The first chunk begins with the prompt if that is echoed.
        """
        prepared = self.prepared
        index = number * prepared.params.n + delta.index
        if prepared.drops_output:
            delta = _without_output(delta)
        text = delta.text
        entries = list(map(self._named, delta.logprobs or ()))
        first = index not in self._num_reported
        num_before = self._num_reported.setdefault(index, 0)
        self._num_reported[index] += len(entries)
        completion = self.generation.states[number].completions[delta.index]
        starts = completion.token_starts(num_before, len(entries))
        num_top = prepared.params.logprobs
        if prepared.echoed is not None:
            prompt = prepared.echoed[number]
            starts = [len(prompt) + start for start in starts]
            if first:
                text = prompt + text
                if num_top is not None:
                    entries = [*self._prompt_entries(number), *entries]
                    starts = [*self._prompt_starts(number), *starts]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": text_logprobs(entries, num_top, starts) if num_top is not None else None,
            "finish_reason": delta.finish_reason and delta.finish_reason.value,
            "stop_reason": delta.stop_reason,
        }
        if prepared.returns_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = prepared.prompts[number].token_ids.tolist()
        if prepared.reports_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self.generation.states[number])
        return choice

    def _prompt_entries(self, number: int) -> list[Entry]:
        found = self.generation.states[number].all_prompt_logprobs() or ()
        first = self.prepared.first_tokens[number].decode(errors="replace")
        if self.prepared.names_ids:
            first = f"token_id:{self.prepared.prompts[number].token_ids[0]}"
        return [self._named(entry) if entry else (first, entry) for entry in found]

    def _prompt_starts(self, number: int) -> list[int]:
        assert self.prepared.echoed is not None
        found, first = self.generation.states[number].all_prompt_logprobs() or (), self.prepared.first_tokens[number]
        data = [next(iter(entry.values())).token_bytes if entry else first for entry in found]
        return prompt_starts(data, len(self.prepared.echoed[number]))

    def _named(self, entry: dict[int, Logprob]) -> Entry:
        """Return a token's alternatives with its text, or with its id if the request asks for that."""
        if self.prepared.names_ids:
            entry = named_by_ids(entry)
        return next(iter(entry.values())).decoded_token, entry


def _without_output(delta: CompletionOutput) -> CompletionOutput:
    """Return `delta` without the token that the engine generates although `max_tokens` is 0."""
    reason = delta.finish_reason and FinishReason.LENGTH
    return replace(delta, text="", token_ids=[], logprobs=None, finish_reason=reason)

"""Log-probabilities in the forms of OpenAI's chat and text completions, and prompts' in vLLM's."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

from forkpoint.engine.outputs import RequestState
from forkpoint.outputs import Logprob
from forkpoint.server.protocol import ReplyModel


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class TextLogprobs(ReplyModel):
    """Lists with one entry per token. The first token of a prompt has no log-probability, as nothing predicts it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ReplyModel):
    """An alternative in vLLM's form. Rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


def prompt_logprobs(state: RequestState) -> list[dict[int, dict[str, Any]] | None] | None:
    """Return the alternatives at each prompt token, by token id; None if the request does not ask for them.

    The entry of the first token is None, as nothing predicts it.
    """
    found = state.all_prompt_logprobs()
    if found is None:
        return None
    return [
        {token: _prompt_logprob(one) for token, one in entry.items()} if entry is not None else None for entry in found
    ]


def _prompt_logprob(one: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}


def named_by_ids(entry: Mapping[int, Logprob]) -> dict[int, Logprob]:
    """Return alternatives with each token's id in place of its text, as vLLM writes it."""
    return {token: replace(one, decoded_token=f"token_id:{token}") for token, one in entry.items()}


def chat_logprobs(entries: Sequence[Mapping[int, Logprob]], num_top: int) -> dict[str, Any]:
    """Return the log-probabilities of a chat completion.

    Each entry has the chosen token first, as `engine.outputs.logprob_dict` makes it.
    """
    content = []
    for entry in entries:
        top = [_top_logprob(one) for one in sorted(entry.values(), key=lambda one: one.rank) if one.rank <= num_top]
        content.append({**_top_logprob(next(iter(entry.values()))), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_starts(tokens: Sequence[bytes], num_characters: int) -> list[int]:
    """Return the characters at which a prompt's tokens start in its text, or of which they are a further part.

    A text may lack the beginning of its first tokens: a special token, or the space that SentencePiece adds.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    starts = list(accumulate((len(decoder.decode(data)) for data in tokens), initial=0))
    num_absent = max(starts.pop() + len(decoder.decode(b"", final=True)) - num_characters, 0)
    return [max(start - num_absent, 0) for start in starts]


def text_logprobs(
    entries: Sequence[tuple[str, Mapping[int, Logprob] | None]], num_top: int, starts: Sequence[int]
) -> dict[str, Any]:
    """Return the log-probabilities of a text completion, or of its next part.

    `entries` are (text of the token, its alternatives or None if nothing predicts it). The tokens start at the
    characters `starts` of the text.
    """
    alternatives = [entry for _, entry in entries]
    return {
        "text_offset": list(starts),
        "token_logprobs": [_finite(next(iter(entry.values())).logprob) if entry else None for entry in alternatives],
        "tokens": [text for text, _ in entries],
        "top_logprobs": [_top(entry, num_top) if entry else None for entry in alternatives],
    }


def _top_logprob(one: Logprob) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": _finite(one.logprob), "bytes": list(one.token_bytes)}


def _top(entry: Mapping[int, Logprob], num_top: int) -> dict[str, float]:
    """Return the chosen token and the `num_top` most likely tokens, by text, the most likely first."""
    found: dict[str, float] = {}
    chosen = next(iter(entry.values()))
    for one in sorted(entry.values(), key=lambda one: one.rank):
        if one.rank <= num_top or one is chosen:
            found.setdefault(one.decoded_token, _finite(one.logprob))  # two ids may share a text
    return found


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity; OpenAI's API and vLLM send this value

"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class TextLogprobs(ReplyModel):
    """Lists with one entry per token; nothing foretells the first token of a prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ReplyModel):
    """vLLM's form of an alternative; `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


def prompt_logprobs(state: RequestState) -> list[dict[int, dict[str, Any]] | None] | None:
    """Return log-probabilities by token id for each prompt token; None if they were not requested.

    The first token's entry is None.
    """
    found = state.all_prompt_logprobs()
    if found is None:
        return None
    return [
        {token: _prompt_logprob(one) for token, one in entry.items()} if entry is not None else None for entry in found
    ]


def _prompt_logprob(one: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}


def chat_logprobs(entries: Sequence[Mapping[int, Logprob]], num_top: int) -> dict[str, Any]:
    """`entries` have the chosen token first, as `engine.outputs.logprob_dict` makes them."""
    content = []
    for entry in entries:
        top = [_told(one) for one in sorted(entry.values(), key=lambda one: one.rank) if one.rank <= num_top]
        content.append({**_told(next(iter(entry.values()))), "top_logprobs": top})
    return {"content": content}


def text_logprobs(
    entries: Sequence[tuple[str, Mapping[int, Logprob] | None]], num_top: int, offset: int
) -> dict[str, Any]:
    """`entries` are (text of the token, its alternatives or None); the first token starts at `offset`."""
    texts = [text for text, _ in entries]
    return {
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        "token_logprobs": [_finite(next(iter(entry.values())).logprob) if entry else None for _, entry in entries],
        "tokens": texts,
        "top_logprobs": [_top(entry, num_top) if entry else None for _, entry in entries],
    }


def _told(one: Logprob) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": _finite(one.logprob), "bytes": list(one.token_bytes)}


def _top(entry: Mapping[int, Logprob], num_top: int) -> dict[str, float]:
    """The chosen token and the `num_top` most likely ones, the most likely first."""
    found: dict[str, float] = {}
    chosen = next(iter(entry.values()))
    for one in sorted(entry.values(), key=lambda one: one.rank):
        if one.rank <= num_top or one is chosen:
            found.setdefault(one.decoded_token, _finite(one.logprob))  # two ids may share a text
    return found


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON knows no infinity

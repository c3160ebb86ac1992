"""The body of a text completion."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from forkpoint.checks import MAX_INTEGER
from forkpoint.server.protocol import Many, TokenId
from forkpoint.server.sampling import SamplingBody, bounded

NO_LIMIT: Final = -1


def _count(given: object) -> object:
    """Return the number of alternatives that a truth value asks for, as in chats: one or none. Else return `given`."""
    if isinstance(given, bool):
        return 1 if given else None
    return given


class CompletionBody(SamplingBody, path="/v1/completions", apis=("completions", "text")):
    """Complete one prompt or several. A prompt is a text or a list of token ids."""

    prompt: str | Many[TokenId] | Many[str] | Many[Many[TokenId]]
    max_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_INTEGER, description="-1: as many as the context holds")
    echo: bool | None = None
    logprobs: Annotated[int | None, BeforeValidator(_count)] = bounded("logprobs")
    add_special_tokens: bool | None = Field(None, description="false: add no special tokens to the prompt's text")

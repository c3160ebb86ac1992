"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, model_validator

from forkpoint.server.body import parse, validated
from forkpoint.server.chat.body import ChatBody, ChatMessage, ToolSpec
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import Body, Many, ReplyModel, TokenId
from forkpoint.server.talk import prompt_of
from forkpoint.server.texts import Texts

OWN_FIELDS: Final = {"model", "prompt", "add_special_tokens", "return_token_strs"}


class TokenizeBody(Body):
    """A text (`prompt`) or a conversation (`messages`) to tokenise as the completion endpoints would.

    With `messages` the other fields of a chat completion have their meaning, too. Only `truncate_prompt_tokens` has no
    effect: the reply has all tokens, also of a prompt that does not fit the context.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    tools: Many[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise HTTPError(400, "the request needs either prompt or messages; give one of them")
        return self


class TokenizeReply(ReplyModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    cache_breakpoints: list[int] = Field(description="token positions at which a message ends")


class TokenizerInfo(ReplyModel):
    """What clients have to know of the tokenizer. `chat_template` is the text of the template, in Jinja."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Many[TokenId]


class DetokenizeReply(ReplyModel):
    prompt: str


def tokenize(texts: Texts, data: bytes) -> TokenizeReply:
    """Answer POST /tokenize. Runs in a reader's process. Raises HTTPError or ForkpointError for a wrong request."""
    body = parse(TokenizeBody, data)
    texts.served_name(body.model)
    tokenizer = texts.require_tokenizer()
    breakpoints: tuple[int, ...] = ()
    if body.messages is not None:
        given = body.model_dump(exclude_unset=True, exclude=OWN_FIELDS)
        prompt = prompt_of(texts, validated(ChatBody, given))
        ids, breakpoints = prompt.token_ids.tolist(), prompt.breakpoints
    else:
        text = body.prompt or ""
        texts.check_length(text)
        ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    return TokenizeReply(
        count=len(ids),
        max_model_len=texts.inputs.max_model_len,
        tokens=ids,
        token_strs=tokenizer.hf.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        cache_breakpoints=list(breakpoints),
    )


def tokenizer_info(texts: Texts, data: bytes) -> TokenizerInfo:
    """Answer GET /tokenizer_info. Runs in a reader's process. Raises InvalidPromptError without a tokenizer."""
    hf = texts.require_tokenizer().hf
    return TokenizerInfo(
        tokenizer_class=type(hf).__name__,
        model_max_length=texts.inputs.max_model_len,
        chat_template=texts.template or None,
        bos_token=hf.bos_token,
        eos_token=hf.eos_token,
        pad_token=hf.pad_token,
        unk_token=hf.unk_token,
    )


def detokenize(texts: Texts, data: bytes) -> DetokenizeReply:
    """Answer POST /detokenize. Runs in a reader's process. Raises HTTPError or ForkpointError for a wrong request."""
    body = parse(DetokenizeBody, data)
    texts.served_name(body.model)
    limit = texts.inputs.vocab_size
    unknown = [token for token in body.tokens if not 0 <= token < limit]
    if unknown:
        raise HTTPError(400, f"token id {unknown[0]} is unknown; the model has ids 0 to {limit - 1}", param="tokens")
    return DetokenizeReply(prompt=texts.text_of(body.tokens))

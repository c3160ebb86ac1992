"""Bodies of OpenAI's Responses API, and their translation to chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field

from forkpoint.obs.notices import Note
from forkpoint.params import MAX_STOP_TOKEN_IDS
from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody, ThinkingFields, ThinkingOptions
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN, Body, Many, MaxTokens, TokenId, TransferParams
from forkpoint.server.responses.items import is_reference, messages_of, referred, resolved
from forkpoint.server.responses.store import Stored
from forkpoint.server.responses.tools import AnyTool, FunctionTool, LaterTools, ToolChoice, Tools, chat_choice
from forkpoint.server.sampling import SampledBody, bounded


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="ignored; ask for long or short texts in the instructions")


class CountBody(SampledBody, ThinkingFields, path="/v1/responses/input_tokens", apis=("responses",)):
    """Count the tokens of a conversation, which may go on from a stored response."""

    input: str | Many[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    thinking: ThinkingOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class ResponsesBody(CountBody, path="/v1/responses"):
    """Answer a conversation, which may go on from a stored response.

    With `background` the server answers at once, and goes on generating the response.
    """

    input: str | Many[dict[str, Any]]
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: MaxTokens | None = None
    stop_token_ids: Many[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: the answer leaves reasoning out")
    include: Many[str] | None = Field(None, description="parts that this server does not have are left out")
    top_logprobs: int | None = bounded(
        "logprobs", "with include: message.output_text.logprobs, or a number above 0, texts have log-probabilities"
    )
    metadata: dict[str, Any] | None = None
    kv_transfer_params: TransferParams = None
    user: str | None = None
    service_tier: str | None = None

    @property
    def asks_for_summary(self) -> bool:
        """Whether the client reads the reasoning as a summary, as OpenAI's server sends it."""
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")


@dataclass(frozen=True, slots=True)
class Wanted:
    """References of a request: the response that it goes on from, and ids of items of stored responses."""

    response: str | None
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The stored responses that a request refers to: the one that it goes on from, and those that have its items."""

    previous: Stored | None
    with_items: tuple[Stored, ...]


NOTHING_FOUND: Final = Found(None, ())


def wanted(body: CountBody) -> Wanted | None:
    """Return the references of `body` to stored data, or None if it has none."""
    items: tuple[str, ...] = ()
    if not isinstance(body.input, str):
        items = tuple(map(referred, filter(is_reference, body.input or ())))
    if not body.previous_response_id and not items:
        return None
    return Wanted(body.previous_response_id, items)


def conversation_of(body: CountBody, found: Found | None) -> list[dict[str, Any]]:
    """Return the items of the conversation that `body` goes on from, and those of `body`.

    Raises HTTPError if `body` refers to an item that was not `found`.
    """
    found = found or NOTHING_FOUND
    items = found.previous.items() if found.previous is not None else []
    if isinstance(body.input, str):
        return [*items, {"role": "user", "content": body.input}]
    stored = [item for response in found.with_items for item in response.items()]
    return items + resolved(body.input or (), stored)


def later_tools(conversation: Sequence[dict[str, Any]]) -> list[LaterTools]:
    """Return the items of a conversation that bring tools. Raises HTTPError for one with a wrong tool."""
    kinds = ("tool_search_output", "additional_tools")
    return [validated(LaterTools, item) for item in conversation if item.get("type") in kinds]


def chat_fields(body: CountBody, conversation: Sequence[dict[str, Any]], tools: Tools, note: Note) -> dict[str, Any]:
    """Return the fields of the chat completion that `body` asks for.

    `conversation` comes from `conversation_of`, `tools` from `chat_tools`. `note` receives notices about ignored parts.
    Raises HTTPError naming an item or a part that this server does not understand.
    """
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, Any] = {
        **{
            name: getattr(body, name, None) for name in ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys()
        },
        "messages": system + messages_of(conversation, note),
        "tools": tools.shown,
        "tool_choice": chat_choice(body.tool_choice),
    }
    if isinstance(body, ResponsesBody):
        fields["max_completion_tokens"] = body.max_output_tokens
        fields["logprobs"] = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        ignored = "which is ignored; ask for long or short texts in the instructions"
        note(f"requests to {body.path} have text.verbosity, {ignored}")
    if not fields["messages"]:
        if not body.input:
            raise HTTPError(400, "input is empty; give a text or at least one item", param="input")
        kinds = ", ".join(sorted({str(item.get("type"))[:MAX_SHOWN] for item in body.input if isinstance(item, dict)}))
        text = f"no item of input is understood ({kinds}); add messages, or calls of functions and their outputs"
        raise HTTPError(400, text, param="input")
    return {name: value for name, value in fields.items() if value is not None}


def echo(body: ResponsesBody) -> dict[str, Any]:
    """Return the request's fields that a response repeats. Some clients expect all of them."""
    unread = body.model_extra or {}
    dumped = body.model_dump(exclude_none=True, by_alias=True, include={"metadata", "text", "reasoning", "tool_choice"})
    absent = dict.fromkeys(("description", "parameters", "strict"))
    tools = [
        {**(absent if isinstance(tool, FunctionTool) else {}), **tool.model_dump(exclude_none=True)}
        for tool in body.tools or ()
    ]
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
        **{name: unread.get(name) for name in ("max_tool_calls", "prompt_cache_key", "safety_identifier")},
        **dumped,
        "background": bool(body.background),
        "tools": tools,
    }


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise HTTPError(400, "text.format of the type json_schema needs schema", param="text.format")
    schema = {"name": given.name or "answer", "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": schema}

"""Bodies of Anthropic's Messages API, and their translation to chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from forkpoint.obs.notices import Note
from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody, ThinkingFields, ThinkingOptions
from forkpoint.server.errors import HTTPError
from forkpoint.server.messages.client_tools import client_tool
from forkpoint.server.messages.history import added_tools, chat_messages, not_understood, text_of
from forkpoint.server.protocol import MAX_SHOWN, Body, Many, MaxTokens, RequestBody, Stops, TransferParams
from forkpoint.server.sampling import bounded


class InputMessage(Body):
    """A message. `content` is a text, or a list of text, thinking, tool_use and tool_result blocks.

    Roles are user, assistant and system.
    """

    role: str
    content: str | Many[dict[str, Any]] | None


class Tool(Body):
    """A tool that the client runs, or that Anthropic's servers run, which is left out.

    Some tools of the client have a `type` of Anthropic's in place of a schema.
    """

    name: str = Field("", description="tools that Anthropic's servers run may have none")
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = Field(None, description="custom, or one such as bash_20250124")
    defer_loading: bool | None = Field(None, description="true: the model sees the tool where a result refers to it")
    strict: bool | None = Field(None, description="true: all calls match input_schema")


class Thinking(ThinkingOptions):
    """Whether the model thinks, and for how many tokens at most (`budget_tokens`).

    With the `display` `omitted`, thinking blocks have their text only in the signature, which the client sends back.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Choice(Body):
    """The tool that the answer must call, or the rule for calling any tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(RequestBody, ThinkingFields, path="/v1/messages/count_tokens", apis=("messages",)):
    """Count the tokens of a conversation."""

    model: str | None = None
    messages: Many[InputMessage] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, path="/v1/messages"):
    """Answer a conversation. The end of each message is a breakpoint of the prefix cache, with or without a mark."""

    max_tokens: MaxTokens
    stop_sequences: Stops = None
    stream: bool | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    cache_salt: str | None = Field(None, description="prompts share cached prefixes only under the same salt")
    kv_transfer_params: TransferParams = None

    @property
    def has_thinking(self) -> bool:
        """Whether the client asked for thinking. A client that did not may take the first block for the answer."""
        if self.thinking is not None:
            return self.thinking.type != "disabled"
        return bool(self.thinking_variables().get("enable_thinking"))


def chat_fields(body: CountTokensBody, note: Note) -> dict[str, Any]:
    """Return the fields of the chat completion that `body` asks for. `note` receives notices about ignored parts.

    Raises HTTPError naming a part that this server does not understand.
    """
    messages: list[dict[str, Any]] = []
    if body.system and (system := text_of(body.system, "system")):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        messages += chat_messages(message.role, message.content, note)
    same = MessagesBody.model_fields.keys() & ChatBody.model_fields.keys() - ThinkingFields.model_fields.keys()
    fields: dict[str, Any] = {name: getattr(body, name, None) for name in same - {"thinking"}}
    tools = list(body.tools or ())
    for definition in (each for message in body.messages for each in added_tools(message.content)):
        added = validated(Tool, definition)
        if all(tool.name != added.name for tool in tools):
            tools.append(added.model_copy(update={"defer_loading": True}))  # the model sees it where it was added
    fields |= {"messages": messages, "tools": _tools(tools, note)}
    fields["chat_template_kwargs"] = {**_thinking(body), **(body.chat_template_kwargs or {})}
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    output_format = (body.output_config or {}).get("format") or body.output_format
    if output_format is not None:
        fields["response_format"] = _response_format(output_format)
    if body.messages[-1].role == "assistant":  # this message is the beginning of the answer
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["thinking_token_budget"] = body.thinking_token_budget
    if body.thinking_token_budget is None and body.thinking is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesBody):
        fields |= {"include_reasoning": body.has_thinking, "stop": body.stop_sequences}
    return {name: value for name, value in fields.items() if value is not None}


def _tools(tools: Sequence[Tool], note: Note) -> list[dict[str, Any]]:
    """Return the functions for `tools`, except those that Anthropic's servers run, which `note` receives notices about.

    Raises HTTPError if none is left.
    """
    own = [tool for tool in tools if tool.type in (None, "custom") or _known(tool)]
    others = [tool.type for tool in tools if tool not in own]
    if others and not own:
        raise not_understood(f"tools of the type {others[0]!r}", "tools")
    for kind in others:
        shown = str(kind)[:MAX_SHOWN]
        note(f"requests have tools of the type {shown!r}, which are left out: this server runs no tools")
    # The model could not find a deferred tool that Anthropic's servers would search for.
    is_found = not any(str(kind).startswith("tool_search_tool") for kind in others)
    return [{**_tool(tool), "defer_loading": bool(tool.defer_loading) and is_found} for tool in own]


def _known(tool: Tool) -> tuple[str, dict[str, Any]] | None:
    return client_tool(tool.type or "", tool.model_extra or {})


def _tool(tool: Tool) -> dict[str, Any]:
    description, schema = _known(tool) or (None, {"type": "object", "properties": {}})
    function = {"name": tool.name, "parameters": tool.input_schema or schema, "strict": tool.strict}
    if (text := tool.description or description) is not None:
        function["description"] = text
    return {"type": "function", "function": function}


def _choice(choice: Choice) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise HTTPError(400, "tool_choice of the type tool needs the tool's name", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    """Return the template's variables about thinking, which is off unless asked for.

    `adaptive` leaves it to the template. `output_config.effort` becomes `reasoning_effort` if there is none.
    """
    variables = body.thinking_variables(body.thinking)
    if body.thinking is None:
        variables.setdefault("enable_thinking", False)
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    return variables


def _response_format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise HTTPError(400, "an output format is {type: json_schema, schema: {...}}", param="output_config")
    schema = {"name": "answer", "schema": given["schema"], "strict": True}  # as Anthropic's servers take it
    return {"type": "json_schema", "json_schema": schema}

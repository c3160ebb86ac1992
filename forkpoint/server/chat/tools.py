"""The tools of a chat request: which ones the chat template shows, and which answers `tool_choice` allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.params import StructuredOutputsParams
from forkpoint.server.calls.call_formats import CallRule
from forkpoint.server.calls.schema_types import moved
from forkpoint.server.chat.body import AllowedFunctionsChoice, AnyToolChoice, ChatBody, FunctionChoice, ToolSpec
from forkpoint.server.custom_tools import INPUT, grammar_of
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN
from forkpoint.server.sampling import structured_outputs
from forkpoint.server.texts import Texts


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How an answer may use the tools of its request.

    `shown`: tools that the chat template shows. `schemas`: schemas of the functions by name, None if no function may be
    called. `forced`: the answer is a single call and nothing else, which the grammar `structured` enforces. `written`:
    the name of a custom tool, if the answer is the text of a call of it. `single`: the answer ends with its first call.
    `rules`: what calls of each function have to match.
    """

    shown: list[dict[str, Any]] | None
    schemas: Mapping[str, Any] | None
    structured: StructuredOutputsParams | None
    forced: bool = False
    written: str | None = None
    single: bool = False
    rules: tuple[CallRule, ...] = ()


def plan_tools(texts: Texts, body: ChatBody) -> ToolPlan:
    """Return the plan for the tools of `body`. Raises HTTPError for a choice that the tools do not offer."""
    tools, choice = body.tools, body.tool_choice
    structured = structured_outputs(texts, body)
    if not tools or choice == "none":
        if not isinstance(choice, str | None) or choice == "required":
            raise HTTPError(
                400,
                "tool_choice asks for a call, but there are no tools; give tools or leave it out",
                param="tool_choice",
            )
        return ToolPlan(None, None, structured)
    shown = [shown_tool(tool) for tool in tools if not tool.defer_loading]
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    rules = tuple(map(_rule, tools))
    wanted = _wanted(choice, list(schemas))
    if isinstance(choice, AllowedFunctionsChoice) and choice.allowed_tools.mode == "auto":
        shown = [tool for tool in shown if tool["function"]["name"] in wanted]
        choice = "auto"
    if choice is None or choice == "auto":
        return ToolPlan(shown or None, schemas, structured, single=body.parallel_tool_calls is False, rules=rules)
    hidden = _hidden(tools, body)
    if choice == "required":
        wanted = [name for name in wanted if name not in hidden] or wanted
    added = hidden.intersection(wanted)  # the model has to see what it must call
    shown = [shown_tool(tool) for tool in tools if not tool.defer_loading or tool.function.name in added]
    [tool] = [tool for tool in tools if tool.function.name == wanted[0]][:1]
    syntax, definition = grammar_of(tool.custom.model_dump()) if tool.custom is not None else ("", "")
    if len(wanted) == 1 and syntax == "lark":
        text = StructuredOutputsParams(grammar=definition)
        return ToolPlan(shown or None, schemas, text, forced=True, written=wanted[0])
    enforced = {tool.function.name: _enforced(texts, tool) for tool in tools if tool.function.name in wanted}
    if len(wanted) == 1:
        schema = _call_schema(wanted[0], enforced[wanted[0]], "")
    else:
        schema = {"anyOf": [_call_schema(name, enforced[name], f"/anyOf/{i}") for i, name in enumerate(wanted)]}
    call = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return ToolPlan(shown or None, schemas, call, forced=True, rules=rules)


def _enforced(texts: Texts, tool: ToolSpec) -> Mapping[str, Any]:
    """Return the schema that the arguments of a forced call match.

    It lacks keywords that cannot be enforced, which the log says, unless the tool is strict.
    """
    schema = tool.function.parameters or {}
    if tool.function.strict or tool.custom is not None:
        return schema
    return texts.relaxed(schema, f"forced calls of the tool {tool.function.name[:MAX_SHOWN]!r}")


def _rule(tool: ToolSpec) -> CallRule:
    name, schema = tool.function.name, tool.function.parameters or {}
    syntax, definition = grammar_of(tool.custom.model_dump()) if tool.custom is not None else ("", "")
    if syntax == "lark":
        return CallRule(name, schema, {"type": "grammar", "grammar": definition}, INPUT)
    if syntax == "regex":
        return CallRule(name, schema, {"type": "regex", "pattern": definition}, INPUT)
    return CallRule(name, schema if tool.function.strict else None)


def shown_tool(tool: ToolSpec) -> dict[str, Any]:
    """Return a tool as the chat template shows it."""
    hidden: Any = {"type": True, "custom": True, "defer_loading": True, "function": {"strict"}}
    return {"type": "function", **tool.model_dump(exclude_unset=True, exclude=hidden)}


def _hidden(tools: Sequence[ToolSpec], body: ChatBody) -> set[str]:
    """Return the names of the deferred tools that no message refers to."""
    hidden = {tool.function.name for tool in tools if tool.defer_loading}
    for message in body.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.get("type") == "tool_reference":
                hidden.discard(str(part.get("tool_name")))
    return hidden


def _wanted(choice: AnyToolChoice | None, names: list[str]) -> list[str]:
    """Return the names of the functions that `choice` allows. Raises HTTPError for one that is not among `names`."""
    if isinstance(choice, str | None):
        return names
    chosen = [choice] if isinstance(choice, FunctionChoice) else choice.allowed_tools.tools
    wanted = list(dict.fromkeys(one.function.name for one in chosen))
    for name in wanted:
        if name not in names:
            raise HTTPError(400, f"tool_choice names {name!r}; the tools are {', '.join(names)}", param="tool_choice")
    return wanted


def _call_schema(name: str, parameters: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of a call, for the place `path` of a larger schema. Raises HTTPError."""
    kind = parameters.get("type", "object")
    if kind != "object" and isinstance(kind, str):
        raise HTTPError(
            400,
            f"the parameters of {name!r} have type {kind!r}; give a schema of type 'object', or leave tool_choice out",
            param="tools",
        )
    arguments = moved(parameters, f"{path}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {**arguments, "type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def customs_of(body: ChatBody) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None)

"""Tools of OpenAI's Responses API, translated to the functions of a chat completion and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from forkpoint.server.errors import HTTPError
from forkpoint.server.notices import Note
from forkpoint.server.protocol import MAX_SHOWN, Body, Many

INPUT: Final = "input"  # the argument that stands for a custom tool's free text


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool whose input is free text. A grammar in `format` is shown to the model and not enforced."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None


class OtherTool(Body):
    """A tool of another type, which OpenAI's servers run. It is left out."""

    type: str


def _kind(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    names = {"function": "FunctionTool", "custom": "CustomTool", "namespace": "NamespaceTool"}
    return names.get(str(kind), "OtherTool")


OwnTool: TypeAlias = (
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[OtherTool, Tag("OtherTool")]
)


class NamespaceTool(Body):
    """Functions and custom tools under a name of their own."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Many[Annotated[OwnTool, Discriminator(_kind)]]


AnyTool: TypeAlias = Annotated[OwnTool | Annotated[NamespaceTool, Tag("NamespaceTool")], Discriminator(_kind)]


class NamedTool(Body):
    """A tool that is chosen."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTool(Body):
    """A tool that may be called. One that OpenAI's servers run is left out."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[AllowedTool] = Field(min_length=1)


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True, slots=True)
class CalledTool:
    """How the client names a tool that the model calls."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` as a chat completion has them; `called` has the tools that the client names in another way."""

    functions: list[dict[str, Any]]
    called: Mapping[str, CalledTool]


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of the function that stands for a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def chat_tools(tools: Sequence[Any], note: Note) -> Tools:
    """Return the functions that stand for `tools`. `note` takes notices about tools that are left out.

    Raises HTTPError where only tools are given that the server would have to run, and for two tools of one name.
    """
    functions: dict[str, dict[str, Any]] = {}
    called: dict[str, CalledTool] = {}
    for namespace, tool in _unpacked(tools):
        if isinstance(tool, OtherTool):
            shown = tool.type[:MAX_SHOWN]
            note(f"requests have tools of the type {shown!r}, which are left out: this server runs no tools")
            continue
        name = flat_name(namespace.name if namespace is not None else None, tool.name)
        if name in functions:
            raise HTTPError(400, f"two tools are named {name!r}; give each a name of its own", param="tools")
        is_custom = isinstance(tool, CustomTool)
        if namespace is not None or is_custom:
            called[name] = CalledTool(tool.name, namespace.name if namespace is not None else None, is_custom)
        functions[name] = _function(name, tool, namespace, note)
    if tools and not functions:
        kinds = ", ".join(sorted({tool.type[:MAX_SHOWN] for _, tool in _unpacked(tools)}))
        raise HTTPError(
            400, f"this server runs no tools, and {kinds} are all that is given; add functions", param="tools"
        )
    return Tools(list(functions.values()), called)


def chat_choice(choice: ToolChoice | None) -> Any:
    """Return `choice` as a chat completion has it. Raises HTTPError for one that leaves no function."""
    match choice:
        case NamedTool():
            return _named(choice.namespace, choice.name)
        case AllowedTools():
            own = [tool for tool in choice.tools if tool.type in ("function", "custom") and tool.name is not None]
            if not own:
                raise HTTPError(400, "tool_choice allows no function or custom tool; name one", param="tool_choice")
            tools = [_named(tool.namespace, str(tool.name)) for tool in own]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def custom_input(arguments: str) -> str:
    """Return a custom tool's free text, from the arguments of the function that stands for it.

    Arguments that are cut off, or that have another form, are returned as they are.
    """
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _unpacked(tools: Sequence[Any]) -> list[tuple[NamespaceTool | None, FunctionTool | CustomTool | OtherTool]]:
    """Return each tool with the namespace that it is in."""
    found: list[tuple[NamespaceTool | None, FunctionTool | CustomTool | OtherTool]] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            found += [(tool, inner) for inner in tool.tools]
        else:
            found.append((None, tool))
    return found


def _function(
    name: str, tool: FunctionTool | CustomTool, namespace: NamespaceTool | None, note: Note
) -> dict[str, Any]:
    texts = [namespace.description if namespace is not None else None, tool.description]
    function: dict[str, Any] = {"name": name}
    if isinstance(tool, FunctionTool):
        if tool.parameters is not None:
            function["parameters"] = tool.parameters
    else:
        function["parameters"] = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        form = tool.format or {}
        if form.get("definition"):
            note(f"the custom tool {tool.name[:MAX_SHOWN]!r} has a grammar, which the model is shown and not held to")
            texts.append(f"{INPUT} follows this {form.get('syntax', '')} grammar:\n{form['definition']}")
    description = "\n\n".join(text for text in texts if text)
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def _named(namespace: str | None, name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": flat_name(namespace, name)}}

"""Translation of the tools of OpenAI's Responses API to functions of a chat completion, and of their calls back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from forkpoint.checks import listed, member
from forkpoint.obs.notices import Note
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import MAX_SHOWN, Body, Many
from forkpoint.server.responses.client_tools import (
    CLIENT_TOOLS,
    ClientToolType,
    client_function,
    function_name,
    is_client_search,
)

OWN_TYPES: Final = ("function", "custom")  # types of tools that the client defines


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(
        default=None, description="true: the model sees the tool once the client has found it"
    )


class CustomTool(Body):
    """A tool whose input is a free text, with an optional grammar in `format`."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None


class OtherTool(Body):
    """A tool of another type. It is left out if OpenAI's servers would run it."""

    type: str


def _kind(tool: object) -> str:
    kind = getattr(tool, "type", member(tool, "type"))
    names = {"function": "FunctionTool", "custom": "CustomTool", "namespace": "NamespaceTool"}
    return names.get(str(kind), "OtherTool")


OwnTool: TypeAlias = (
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[OtherTool, Tag("OtherTool")]
)


class NamespaceTool(Body):
    """A named group of functions and custom tools."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Many[Annotated[OwnTool, Discriminator(_kind)]]


AnyTool: TypeAlias = Annotated[OwnTool | Annotated[NamespaceTool, Tag("NamespaceTool")], Discriminator(_kind)]


class LaterTools(Body):
    """An item that brings tools: `tool_search_output` has those that the client has found, `additional_tools` others.

    The model sees tools that were found in the result of its search, and others from the beginning.
    """

    type: Literal["tool_search_output", "additional_tools"]
    tools: Many[AnyTool]


class NamedTool(Body):
    """A choice of one tool, which the answer must call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ClientToolChoice(Body):
    """A choice of one of OpenAI's tools that the client runs, which the answer must call."""

    type: ClientToolType


class AllowedTool(Body):
    """A tool that the answer may call. Tools that OpenAI's servers would run are left out."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Body):
    """The tools that the answer may call; with the mode `required` it must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[AllowedTool] = Field(min_length=1)


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | ClientToolChoice | AllowedTools


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The client's name for a tool that the model calls, and its type."""

    name: str
    namespace: str | None = None
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools as those of a chat completion.

    `called`: by the name there, the tools that the client names in another way.
    """

    shown: list[dict[str, Any]]
    called: Mapping[str, CalledTool]


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of the function for a tool, after that of its namespace if it has one."""
    if not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def names_of(tools: Iterable[Any]) -> list[str]:
    """Return the names of the functions for tools that are not checked yet."""
    found: list[str] = []
    for tool in tools:
        inner, namespace = [tool], None
        if member(tool, "type") == "namespace":
            inner, namespace = listed(member(tool, "tools")), str(member(tool, "name"))
        found += [flat_name(namespace, str(member(one, "name"))) for one in inner]
    return found


def chat_tools(tools: Sequence[Any], note: Note, later: Sequence[LaterTools] = ()) -> Tools:
    """Return `tools` in the form of a chat completion. `note` receives notices about tools that are left out.

    `later` are items of the conversation that bring further tools. Raises HTTPError if the server would have to run all
    of the tools, or if two of `tools` have one name.
    """
    shown_tools: dict[str, dict[str, Any]] = {}
    called: dict[str, CalledTool] = {}
    defers = any(isinstance(tool, OtherTool) and is_client_search(tool.model_dump()) for tool in tools)
    sources = [(tools, False, defers), *((item.tools, True, item.type == "tool_search_output") for item in later)]
    for namespace, tool, is_later, may_defer in (
        (*pair, is_later, may_defer) for given, is_later, may_defer in sources for pair in _unpacked(given)
    ):
        kind = tool.type
        if isinstance(tool, OtherTool):
            function = client_function(tool.model_dump())
            if function is None:
                shown = kind[:MAX_SHOWN]
                note(f"requests have tools of the type {shown!r}, which are left out: this server runs no tools")
                continue
            tool = FunctionTool(
                type="function", name=function_name(kind), description=function[0], parameters=function[1]
            )
        group: str | None = None
        if namespace is not None:
            group = namespace.name
        name = flat_name(group, tool.name)
        if name in shown_tools and is_later:
            continue
        if name in shown_tools:
            raise HTTPError(400, f"two tools are named {name!r}; give each a name of its own", param="tools")
        if namespace is not None or kind != "function":
            called[name] = CalledTool(tool.name, group, kind)
        shown_tools[name] = _chat_tool(name, tool, namespace)
        if may_defer and (is_later or (isinstance(tool, FunctionTool) and tool.defer_loading)):
            shown_tools[name]["defer_loading"] = True
    if tools and not shown_tools:
        kinds = ", ".join(sorted({tool.type[:MAX_SHOWN] for _, tool in _unpacked(tools)}))
        raise HTTPError(
            400,
            f"this server runs no tools, and all given tools ({kinds}) would need that; add functions",
            param="tools",
        )
    return Tools(list(shown_tools.values()), called)


def chat_choice(choice: ToolChoice | None) -> Any:
    """Return `choice` in the form of a chat completion. Raises HTTPError for a choice that allows no function."""
    match choice:
        case NamedTool():
            return _named(choice.namespace, choice.name)
        case ClientToolChoice():
            return _named(None, function_name(choice.type))
        case AllowedTools():
            tools = [_named(tool.namespace, tool.name) for tool in choice.tools if tool.name and tool.type in OWN_TYPES]
            tools += [_named(None, function_name(tool.type)) for tool in choice.tools if tool.type in CLIENT_TOOLS]
            if not tools:
                raise HTTPError(400, "tool_choice allows no function or custom tool; name one", param="tool_choice")
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _unpacked(tools: Sequence[Any]) -> list[tuple[NamespaceTool | None, FunctionTool | CustomTool | OtherTool]]:
    """Return each tool with its namespace, or None."""
    found: list[tuple[NamespaceTool | None, FunctionTool | CustomTool | OtherTool]] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            found += [(tool, inner) for inner in tool.tools]
        else:
            found.append((None, tool))
    return found


def _chat_tool(name: str, tool: FunctionTool | CustomTool, namespace: NamespaceTool | None) -> dict[str, Any]:
    """Return a tool in the form of a chat completion. The description of its namespace comes before its own."""
    texts = [namespace.description, tool.description] if namespace is not None else [tool.description]
    fields = tool.model_dump(include={"parameters", "format", "strict"}, exclude_none=True)
    fields |= {"name": name, "description": "\n\n".join(filter(None, texts)) or None}
    return {"type": tool.type, tool.type: fields}


def _named(namespace: str | None, name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": flat_name(namespace, name)}}

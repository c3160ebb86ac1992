"""OpenAI's tools that clients run. Requests name their types alone, because OpenAI's models know what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from forkpoint.checks import listed, member

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
TEXTS: Final = {"type": "array", "items": TEXT, "minItems": 1}
ClientToolType: TypeAlias = Literal[
    "local_shell", "shell", "apply_patch", "tool_search", "computer", "computer_use_preview"
]
SEARCH: Final = "tool_search"
POINT: Final = {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x", "y"]}
COMPUTER: Final = (
    "Use the user's computer by its mouse and keyboard, and see its screen. Points are in pixels from the top left "
    "corner. A screenshot comes back with each call."
)
ACTION: Final[Mapping[str, Any]] = {
    "type": {"enum": ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"]},
    "x": NUMBER,
    "y": NUMBER,
    "button": {"enum": ["left", "right", "wheel", "back", "forward"]},
    "scroll_x": NUMBER,
    "scroll_y": NUMBER,
    "path": {"type": "array", "items": POINT},
    "keys": TEXTS,
    "text": TEXT,
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the model sees it, and the item of a call.

    `prefix` begins the item's id. Its field `place` has the arguments, and the members `fixed`; without `is_whole` it
    has the argument of the same name, a list. The item has the fields `others` too. `name` is that of the function,
    which the item's type repeats; None for the tool's type.
    """

    prefix: str
    place: str
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = True
    name: str | None = None

    def value(self, arguments: object) -> Any:
        """Return the value of `place` for the arguments of a call, which may be of any form."""
        if self.is_whole:
            return {**self.fixed, **(arguments if isinstance(arguments, dict) else {})}
        return listed(member(arguments, self.place))

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": dict(self.properties), "required": list(self.required)}


CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = {
    "local_shell": ClientTool(
        "lsh",
        "action",
        "Run a command on the user's machine. The command is a list of its words.",
        {"command": TEXTS, "working_directory": TEXT, "timeout_ms": NUMBER},
        ("command",),
        {"type": "exec", "env": {}},
    ),
    "shell": ClientTool(
        "sh",
        "action",
        "Run commands in a shell on the user's machine.",
        {"commands": TEXTS, "timeout_ms": NUMBER, "max_output_length": NUMBER},
        ("commands",),
    ),
    "apply_patch": ClientTool(
        "apc",
        "operation",
        "Create, update or delete a file. Each line of the diff begins with '+' (added), '-' (removed) or a space "
        "(unchanged), and each section of an update with a line that begins with '@@'.",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": TEXT, "diff": TEXT},
        ("type", "path"),
    ),
    SEARCH: ClientTool(
        "tsc", "arguments", "Search for further tools.", {"query": TEXT}, ("query",), others={"execution": "client"}
    ),
    "computer": ClientTool(
        "cu",
        "actions",
        COMPUTER,
        {"actions": {"type": "array", "items": {"type": "object", "properties": ACTION, "required": ["type"]}}},
        ("actions",),
        others={"pending_safety_checks": []},
        is_whole=False,
    ),
    "computer_use_preview": ClientTool(
        "cu", "action", COMPUTER, ACTION, ("type",), others={"pending_safety_checks": []}, name="computer"
    ),
}


def function_name(kind: str) -> str:
    """Return the name of the function for a client's tool of the type `kind`."""
    known = CLIENT_TOOLS.get(kind)
    return (known.name if known is not None else None) or kind


def is_client_search(tool: Mapping[str, Any]) -> bool:
    """Return whether the client finds further tools, with this tool, and sends them with the next request."""
    return tool.get("type") == SEARCH and tool.get("execution") == "client"


def client_function(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the description and the schema of a tool that the client runs; None if OpenAI's servers would run it."""
    known = CLIENT_TOOLS.get(str(tool.get("type")))
    environment = tool.get("environment")
    is_local = not isinstance(environment, Mapping) or environment.get("type") == "local"
    if known is None or not is_local or (tool.get("type") == SEARCH and not is_client_search(tool)):
        return None
    description, schema = tool.get("description"), tool.get("parameters")
    width, height = tool.get("display_width"), tool.get("display_height")
    size = f" The screen has {width} x {height} pixels." if isinstance(width, int) and isinstance(height, int) else ""
    return (
        description if isinstance(description, str) else known.description + size,
        schema if isinstance(schema, dict) else known.schema,
    )

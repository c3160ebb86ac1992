"""OpenAI's tools that clients run. Requests name their types alone, because OpenAI's models know what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from forkpoint.checks import member

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
TEXTS: Final = {"type": "array", "items": TEXT, "minItems": 1}
ClientToolType: TypeAlias = Literal["local_shell", "shell", "apply_patch", "tool_search"]
SEARCH: Final = "tool_search"


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the model sees it, and the item of a call.

    `prefix` begins the item's id. Its field `place` has the arguments, and the members `fixed`. The item has the fields
    `others` too.
    """

    prefix: str
    place: str
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

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
}


def is_client_search(tool: Mapping[str, Any]) -> bool:
    """Return whether the client finds further tools, with this tool, and sends them with the next request."""
    return tool.get("type") == SEARCH and tool.get("execution") == "client"


def client_function(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the description and the schema of a tool that the client runs; None if OpenAI's servers would run it."""
    known = CLIENT_TOOLS.get(str(tool.get("type")))
    is_local = member(tool.get("environment") or {"type": "local"}, "type") == "local"
    if known is None or not is_local or (tool.get("type") == SEARCH and not is_client_search(tool)):
        return None
    description, schema = tool.get("description"), tool.get("parameters")
    return (
        description if isinstance(description, str) else known.description,
        schema if isinstance(schema, dict) else known.schema,
    )

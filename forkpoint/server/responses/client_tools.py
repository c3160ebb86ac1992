"""OpenAI's tools that clients run. Requests name their types alone, because OpenAI's models know what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
TEXTS: Final = {"type": "array", "items": TEXT, "minItems": 1}
ClientToolType: TypeAlias = Literal["local_shell", "shell", "apply_patch"]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the model sees it, and the item of a call.

    `prefix` begins the item's id. Its field `place` has the arguments, and the members `fixed`.
    """

    prefix: str
    place: str
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

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
}


def client_tool(tool: Mapping[str, Any]) -> ClientTool | None:
    """Return what is known of a tool that the client runs; None for one that OpenAI's servers would run."""
    environment = tool.get("environment") or {"type": "local"}
    is_local = isinstance(environment, Mapping) and environment.get("type") == "local"
    return CLIENT_TOOLS.get(str(tool.get("type"))) if is_local else None

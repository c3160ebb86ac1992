"""Anthropic's tools that clients run. Requests name them alone, because Anthropic's models know what they take."""

from __future__ import annotations

from typing import Any, Final

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
EDITS: Final = {
    "path": TEXT,
    "view_range": {"type": "array", "items": NUMBER, "description": "view: first and last line; -1 is the last"},
    "file_text": {**TEXT, "description": "create: the whole text of the file"},
    "old_str": {**TEXT, "description": "str_replace: the text to replace, which the file has once"},
    "new_str": {**TEXT, "description": "str_replace: the text in its place"},
    "insert_line": {**NUMBER, "description": "insert: the line after which to insert; 0 is the beginning"},
    "insert_text": {**TEXT, "description": "insert: the text to insert"},
}


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _of_files(required: list[str], *commands: str, **more: Any) -> dict[str, Any]:
    """Return the schema of a tool that views and changes files."""
    command = {**TEXT, "enum": ["view", "create", "str_replace", "insert", *commands]}
    return _schema(["command", *required], command=command, **EDITS, **more)


# For each tool, by the beginning of its type without the date of its version: description and schema.
TOOLS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bash_2": (
        "Run a command in a bash session, which keeps its state from call to call.",
        _schema(
            ["command"], command=TEXT, restart={"type": "boolean", "description": "true: start a new session first"}
        ),
    ),
    "text_editor_2": ("View, create and change text files.", _of_files(["path"])),
    "memory_2": (
        "View and change files in the directory /memories, which is kept from conversation to conversation. View it "
        "before you begin a task.",
        _of_files([], "delete", "rename", old_path=TEXT, new_path=TEXT),
    ),
}


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return the description and the schema of a tool of the type `kind` if clients run it and it is known here."""
    return next((found for start, found in TOOLS.items() if kind.startswith(start)), None)

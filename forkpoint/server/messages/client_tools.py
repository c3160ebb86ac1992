"""Anthropic's tools that clients run. Requests name them alone, because Anthropic's models know what they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TEXT: Final = {"type": "string"}
NUMBER: Final = {"type": "integer"}
POINT: Final = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
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


COMPUTER: Final = "computer_2"
FIRST_COMPUTER: Final = "computer_20241022"
FIRST_ACTIONS: Final = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
LATER_ACTIONS: Final = ("triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait")


def client_tool(kind: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the description and the schema of a tool of the type `kind` if clients run it and it is known here.

    `options` are further fields of the tool, such as the size of a computer's screen.
    """
    if kind.startswith(COMPUTER):
        return _computer(kind, options)
    return next((found for start, found in TOOLS.items() if kind.startswith(start)), None)


def _computer(kind: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the description and the schema of a computer with screen, mouse and keyboard."""
    width, height = options.get("display_width_px"), options.get("display_height_px")
    size = f" of {width} x {height} pixels" if isinstance(width, int) and isinstance(height, int) else ""
    description = (
        f"Use a computer by its mouse and keyboard, and take screenshots of its screen{size}. A point is [x, y] in "
        "pixels from the top left corner. Take a screenshot to see what an action has done."
    )
    actions, more = list(FIRST_ACTIONS), dict[str, Any]()
    if kind != FIRST_COMPUTER:
        actions += LATER_ACTIONS
        more = {
            "start_coordinate": {**POINT, "description": "left_click_drag: where the drag begins"},
            "scroll_direction": {"enum": ["up", "down", "left", "right"]},
            "scroll_amount": {**NUMBER, "description": "scroll: clicks of the wheel"},
            "duration": {"type": "number", "description": "hold_key, wait: seconds"},
        }
    if options.get("enable_zoom"):
        actions.append("zoom")
        corners = {"type": "array", "items": NUMBER, "minItems": 4, "maxItems": 4}
        more["region"] = {**corners, "description": "zoom: [x0, y0, x1, y1], the part of the screen to see enlarged"}
    keys = "type: the text; key, hold_key: keys such as Return or ctrl+s; clicks, scroll: keys that are held meanwhile"
    schema = _schema(
        ["action"],
        action={**TEXT, "enum": actions},
        coordinate={**POINT, "description": "where to click, move, scroll or drag to"},
        text={**TEXT, "description": keys},
        **more,
    )
    return description, schema

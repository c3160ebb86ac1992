"""Tools of Anthropic's that clients run: functions with the fields that their clients expect."""

from __future__ import annotations

from typing import Any

import httpx2
import jsonschema
import pytest

from forkpoint.server.messages.body import MessagesBody, chat_fields
from tests.server.test_messages import ask


def test_tools_that_anthropics_models_know_are_functions() -> None:
    kinds = {"bash": "bash_20250124", "edit": "text_editor_20250728", "memory": "memory_20250818"}
    tools: Any = [{"name": name, "type": kind} for name, kind in kinds.items()]
    notes: list[str] = []
    body = MessagesBody.model_validate({**ask("x"), "tools": [*tools, {"name": "w", "type": "web_search_20250305"}]})
    functions = [tool["function"] for tool in chat_fields(body, notes.append)["tools"]]
    assert [function["name"] for function in functions] == list(kinds) and all(f["description"] for f in functions)
    assert len(notes) == 1 and "web_search_20250305" in notes[0]
    commands = [function["parameters"]["properties"]["command"].get("enum") for function in functions]
    assert commands == [None, ["view", "create", "str_replace", "insert"], [*commands[1], "delete", "rename"]]


@pytest.mark.parametrize(
    ("tool", "absent", "has"),
    [
        ({"type": "computer_20241022"}, "scroll", {"coordinate", "text"}),
        ({"type": "computer_20250124", "display_number": 1}, "zoom", {"scroll_direction", "scroll_amount"}),
        ({"type": "computer_20251124", "enable_zoom": True}, "", {"duration", "start_coordinate", "region"}),
    ],
)
def test_a_computer_is_a_function(tool: dict[str, Any], absent: str, has: set[str]) -> None:
    tool |= {"name": "computer", "display_width_px": 1280, "display_height_px": 800}
    toolset = {"type": "browser_toolset_20260801", "configs": {}}  # it has no name
    notes: list[str] = []
    body = MessagesBody.model_validate({**ask("x"), "tools": [tool, toolset]})
    [function] = [tool["function"] for tool in chat_fields(body, notes.append)["tools"]]
    assert function["name"] == "computer" and "1280 x 800 pixels" in function["description"]
    schema = function["parameters"]
    assert "left_click" in schema["properties"]["action"]["enum"] and has <= schema["properties"].keys()
    assert absent not in schema["properties"]["action"]["enum"]
    assert len(notes) == 1 and "browser_toolset_20260801" in notes[0]
    jsonschema.validate({"action": "left_click", "coordinate": [3, 4]}, schema)


def test_a_tool_of_the_client_needs_a_name(http: httpx2.Client) -> None:
    for tool in ({"input_schema": {}}, {"type": "bash_20250124"}):
        reply = http.post("/v1/messages", json={**ask("x"), "tools": [tool]})
        assert reply.status_code == 400 and "name" in reply.json()["error"]["message"], reply.text

"""Tools of Anthropic's that clients run: functions with the fields that their clients expect."""

from __future__ import annotations

from typing import Any, cast

import httpx2
import jsonschema
import pytest

from forkpoint.server.body import validated
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.chat.history import shown_messages
from forkpoint.server.chat.tools import plan_tools
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


def test_tools_are_added_and_removed_within_a_conversation(http: httpx2.Client) -> None:
    """The SDK's tool runner sends these blocks for `add_tools` and `remove_tools`."""
    clock = {"name": "clock", "description": "Tells the time.", "input_schema": {"type": "object"}}
    change = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": clock}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    turns = [{"role": "user", "content": "x"}, {"role": "system", "content": [change, removal]}]
    fields = {**ask("x"), "messages": turns, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    notes: list[str] = []
    chat = validated(ChatBody, chat_fields(MessagesBody.model_validate(fields), notes.append))
    shown = shown_messages(chat.messages, notes.append, tools=chat.tools or (), drops_billing_lines=False)
    added, removed = (part["text"] for part in shown[1]["content"])
    assert "The tool clock is available:" in added and "Tells the time." in added
    assert removed == "The tool look is no longer available." and not notes
    plan = plan_tools(cast(Any, None), chat)
    assert [tool["function"]["name"] for tool in plan.shown or ()] == ["look"] and "clock" in (plan.schemas or {})
    forced = {**fields, "tool_choice": {"type": "tool", "name": "clock"}, "max_tokens": 40}
    [block] = http.post("/v1/messages", json=forced).json()["content"]
    assert (block["type"], block["name"]) == ("tool_use", "clock")
    wrong = {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "mcp_server_name": "s"}}
    reply = http.post("/v1/messages", json={**ask("x"), "messages": [{"role": "user", "content": [wrong]}]})
    assert reply.status_code == 400 and "without the name of a tool" in reply.json()["error"]["message"]


def test_a_tool_of_the_client_needs_a_name(http: httpx2.Client) -> None:
    for tool in ({"input_schema": {}}, {"type": "bash_20250124"}):
        reply = http.post("/v1/messages", json={**ask("x"), "tools": [tool]})
        assert reply.status_code == 400 and "name" in reply.json()["error"]["message"], reply.text

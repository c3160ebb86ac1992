"""Tools that a client of the Responses API finds when the model asks for them, or adds later."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from forkpoint.server.responses.body import ResponsesBody, chat_fields, conversation_of, later_tools
from forkpoint.server.responses.tools import chat_tools
from tests.server.test_responses import GREEDY, TOOLS

QUERY: dict[str, Any] = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
SEARCH: Any = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": QUERY}
FOUND: Any = {"type": "function", "name": "found", "parameters": {"type": "object"}, "defer_loading": True}
NAMESPACE: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOLS[1]]}


def conversation(*tools: Any, kind: str = "tool_search_output") -> list[Any]:
    call = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"days": 1}}
    output = {"type": kind, "call_id": "c", "execution": "client", "tools": list(tools)}
    return [{"role": "user", "content": "x"}, call, output]


def chat_of(**fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The fields of the chat completion, and what the log says."""
    notes: list[str] = []
    body = ResponsesBody.model_validate(fields)
    items = conversation_of(body, None)
    return chat_fields(body, items, chat_tools(body.tools or (), notes.append, later_tools(items)), notes.append), notes


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_searches_and_the_client_gets_the_call(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "tiny", "tools": [SEARCH], "tool_choice": {"type": "tool_search"}}
    if stream:
        events: list[Any] = list(client.responses.create(**fields, input="Go", stream=True))
        [item] = events[-1].response.output
        assert not any("function_call" in event.type for event in events)
    else:
        [item] = client.responses.create(**fields, input="Go").output
    assert item.type == "tool_search_call" and item.execution == "client" and item.status == "completed"
    assert item.arguments["days"] in (1, 2) and item.call_id
    items: Any = [{"role": "user", "content": "Go"}, item.model_dump(exclude_none=True)]
    items.append({"type": "tool_search_output", "call_id": item.call_id, "execution": "client", "tools": [FOUND]})
    choice: Any = {"type": "function", "name": "found"}
    short: dict[str, Any] = {"model": "tiny", "max_output_tokens": 60}
    [call] = client.responses.create(**short, input=items, tools=[SEARCH], tool_choice=choice).output
    assert call.type == "function_call" and call.name == "found"


def test_what_was_found_is_shown_in_the_result() -> None:
    chat, notes = chat_of(input=conversation(FOUND, NAMESPACE), tools=[SEARCH, TOOLS[0]])
    shown = {tool["function"]["name"]: tool.get("defer_loading", False) for tool in chat["tools"]}
    assert shown == {"tool_search": False, TOOLS[0]["name"]: False, "found": True, f"crm__{TOOLS[1]['name']}": True}
    [call] = chat["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "tool_search", "arguments": {"days": 1}}
    names = [part["tool_name"] for part in chat["messages"][2]["content"]]
    assert names == ["found", f"crm__{TOOLS[1]['name']}"] and not notes
    chat, _ = chat_of(input=conversation(), tools=[SEARCH, TOOLS[0], TOOLS[1] | {"defer_loading": True}])
    assert chat["messages"][2]["content"] == "No tool was found."
    assert [tool.get("defer_loading", False) for tool in chat["tools"]] == [False, False, True]


def test_added_tools_and_those_of_a_servers_search_are_shown_from_the_beginning() -> None:
    chat, notes = chat_of(input=conversation(FOUND, TOOLS[0], kind="additional_tools"), tools=[TOOLS[0]])
    assert [tool["function"]["name"] for tool in chat["tools"]] == [TOOLS[0]["name"], "found"]
    assert not any("defer_loading" in tool for tool in chat["tools"]) and not notes
    chat, notes = chat_of(input="x", tools=[{"type": "tool_search"}, FOUND])
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["found"] and len(notes) == 1
    assert not any("defer_loading" in tool for tool in chat["tools"])


def test_the_prompt_before_the_search_stays_the_same(http: httpx2.Client) -> None:
    def num_tokens(items: Any) -> int:
        body = {"input": items, "tools": [SEARCH]}
        return int(http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"])

    before = num_tokens([{"role": "user", "content": "x"}])
    other = num_tokens(conversation(FOUND)) - num_tokens(conversation())
    assert before and other > 40  # the definition
    wrong = http.post("/v1/responses", json={**GREEDY, "input": conversation({"type": "function"})})
    assert wrong.status_code == 400 and "tools.0" in wrong.json()["error"]["message"], wrong.text

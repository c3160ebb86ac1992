"""Tools of the Responses API that are no plain functions: namespaces, custom tools and tools of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from forkpoint.server.body import validated
from forkpoint.server.responses.body import ResponsesBody
from forkpoint.server.responses.items import messages_of
from forkpoint.server.responses.tools import chat_tools
from tests.server.running import RunningServer
from tests.server.test_responses import GREEDY, TOOLS

NAMESPACE: Any = {"type": "namespace", "name": "agents", "description": "Others.", "tools": TOOLS[1:]}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Change files."}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_in_a_namespace_is_called(client: openai.OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "name": "history", "namespace": "agents"}
    fields: dict[str, Any] = {"model": "tiny", "tools": [NAMESPACE], "tool_choice": choice}
    fields |= {"input": "Weather?", "max_output_tokens": 80}
    if stream:
        events = list(client.responses.create(**fields, stream=True))
        [item] = [event.item for event in events if event.type == "response.output_item.done"]
    else:
        [item] = client.responses.create(**fields).output
    assert item.type == "function_call" and (item.namespace, item.name) == ("agents", "history")
    assert json.loads(item.arguments)["days"] in (1, 2, 3)
    told = {"role": "user", "content": "Weather?"}
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
    items: Any = [told, item.model_dump(exclude_none=True), result]
    assert client.responses.create(**GREEDY, input=items).output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_free_text(client: openai.OpenAI, stream: bool) -> None:
    options = {
        "max_output_tokens": 300,
        "extra_body": {"logit_bias": {str(ord('"')): 30}},
    }  # a random text would not end
    fields: dict[str, Any] = {
        "model": "tiny",
        "tools": [PATCH],
        "tool_choice": {"type": "custom", "name": PATCH["name"]},
    }
    if stream:
        events = list(client.responses.create(**fields, **options, input="Patch", stream=True))
        kinds = [event.type for event in events]
        assert kinds[3:5] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        [item] = [event.item for event in events if event.type == "response.output_item.done"]
        assert [event.input for event in events if event.type == kinds[4]] == [item.input]  # type: ignore[union-attr]
    else:
        [item] = client.responses.create(**fields, **options, input="Patch").output
    assert item.type == "custom_tool_call" and item.name == "apply_patch" and isinstance(item.input, str)
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    items: Any = [{"role": "user", "content": "Patch"}, item.model_dump(exclude_none=True), result]
    assert client.responses.create(**GREEDY, input=items, tools=[PATCH]).output_text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["local_shell", "shell"])  # a prompt with apply_patch is too long here
def test_openais_tools_that_clients_run_are_called(client: openai.OpenAI, kind: str, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "tiny", "tools": [{"type": kind}], "tool_choice": {"type": kind}}
    # a random text would not end
    fields |= {"max_output_tokens": 200, "extra_body": {"logit_bias": {str(ord(end)): 30 for end in '"]}'}}}
    if stream:
        events = list(client.responses.create(**fields, input="Go", stream=True))
        [item] = [event.item for event in events if event.type == "response.output_item.done"]
        response: Any = events[-1].response  # type: ignore[union-attr]
        assert response.output == [item] and not any("delta" in event.type for event in events)
    else:
        [item] = client.responses.create(**fields, input="Go").output
    assert item.type == f"{kind}_call" and item.status == "completed" and item.call_id
    if item.type == "local_shell_call":
        assert item.action.type == "exec" and item.action.command
    else:
        assert item.type == "shell_call" and item.action.commands
    result = {"type": f"{kind}_call_output", "call_id": item.call_id, "output": "done"}
    items: Any = [{"role": "user", "content": "Go"}, item.model_dump(exclude_none=True), result]
    assert client.responses.create(**GREEDY, input=items).output_text


def test_a_shell_of_openais_servers_is_left_out() -> None:
    tools = [TOOLS[0], {"type": "shell", "environment": {"type": "container_auto"}}, {"type": "shell"}]
    notes: list[str] = []
    body = validated(ResponsesBody, {"input": "x", "tools": tools})
    shown = chat_tools(body.tools or (), notes.append).shown
    assert [tool["function"]["name"] for tool in shown] == ["forecast", "shell"] and len(notes) == 1


def test_tools_that_the_server_would_run_are_left_out_and_logged_once(
    server: RunningServer, http: httpx2.Client
) -> None:
    kinds = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "of_next_year")
    for _ in range(2):
        tools = [TOOLS[0], *({"type": kind} for kind in kinds)]
        reply = http.post("/v1/responses", json={**GREEDY, "input": "x", "tools": tools, "text": {"verbosity": "low"}})
        assert reply.status_code == 200 and reply.json()["tools"][1:] == tools[1:]
    for kind in kinds:
        assert server.log.count(f"tools of the type {kind!r}, which are left out") == 1
    assert server.log.count("requests to /v1/responses have text.verbosity, which is ignored") == 1


def test_a_custom_tool_keeps_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    group = {**NAMESPACE, "tools": [{**PATCH, "format": grammar}]}
    tools = validated(ResponsesBody, {"input": "x", "tools": [group]}).tools
    custom = {"name": "agents__apply_patch", "description": "Others.\n\nChange files.", "format": grammar}
    assert chat_tools(tools or (), [].append).shown == [{"type": "custom", "custom": custom}]


def test_items_of_other_tools_are_calls_or_left_out() -> None:
    call, result = {"call_id": "c", "id": "x", "status": "completed"}, {"call_id": "c", "output": "ok"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    notes: list[str] = []
    items: list[dict[str, Any]] = [
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "AA"},
        {"type": "local_shell_call", **call, "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "ok"},  # it has no call_id
        {"type": "custom_tool_call", **call, "name": "patch", "namespace": "files", "input": "+a"},
        {"type": "custom_tool_call_output", **result},
        {"type": "function_call", **call, "name": "spawn", "namespace": "mcp__agents__", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
        {"type": "computer_call", **call, "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": {**image, "type": "computer_screenshot"}},
        {"type": "custom_tool_call", **call, "name": "see", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c", "output": image},
        {"type": "apply_patch_call", **call, "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        {"type": "compaction", "encrypted_content": "AA"},
    ]
    messages = messages_of(items, notes.append)
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert functions == [
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
        {"name": "files__patch", "arguments": '{"input": "+a"}'},
        {"name": "mcp__agents__spawn", "arguments": "{}"},
        {"name": "computer", "arguments": {"type": "screenshot"}},
        {"name": "see", "arguments": '{"input": ""}'},
        {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}},
    ]
    assert messages[0]["reasoning_content"] == "Hm"
    assert [message["role"] for message in messages] == ["assistant", "tool"] * 6
    assert [message["content"] for message in messages[5::2]] == [[image]] * 3 + ["completed"]
    assert len(notes) == 2 and "'web_search_call'" in notes[0] and "'compaction'" in notes[1]

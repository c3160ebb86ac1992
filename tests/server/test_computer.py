"""OpenAI's computer, which clients of the Responses API run: its calls are `computer_call` items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.scripted import SERVED_NAME, scripted_server

CLICK = {"type": "click", "x": 3, "y": 4, "button": "left"}
TYPE = {"type": "type", "text": "hi"}
NEWER: Any = {"type": "computer"}
OLDER: Any = {"type": "computer_use_preview", "display_width": 640, "display_height": 480, "environment": "browser"}
SCRIPTS = {
    "one": ['<tool_call>{"name": "computer", "arguments": ', json.dumps(CLICK), "}</tool_call>"],
    "two": ['<tool_call> {"name": "computer", "arguments": {"actions": ', json.dumps([CLICK, TYPE]), "}} </tool_call>"],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with scripted_server(tmp_path_factory.mktemp("computer"), SCRIPTS) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)


@pytest.mark.parametrize(("script", "tool"), [("one", OLDER), ("two", NEWER)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_the_actions(client: openai.OpenAI, script: str, tool: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"model": SERVED_NAME, "input": script, "tools": [tool], "truncation": "auto"}
    if stream:
        events: list[Any] = list(client.responses.create(**fields, stream=True))
        [item] = events[-1].response.output
        assert [event.item for event in events if event.type == "response.output_item.done"] == [item]
    else:
        [item] = client.responses.create(**fields).output
    assert item.type == "computer_call" and item.status == "completed" and item.pending_safety_checks == []
    said = item.model_dump(exclude_none=True)
    assert said.get("action") == (CLICK if tool is OLDER else None)
    assert said.get("actions") == (None if tool is OLDER else [CLICK, TYPE])
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    result = {"type": "computer_call_output", "call_id": item.call_id, "output": shot}
    items: Any = [{"role": "user", "content": "x"}, said, result, {"role": "user", "content": script}]
    again = client.responses.create(model=SERVED_NAME, input=items, tools=[tool])
    assert again.output[-1].type == "computer_call"


def test_a_choice_of_the_computer_forces_a_call(client: openai.OpenAI) -> None:
    for tool in (OLDER, NEWER):
        choice: Any = {"type": tool["type"]}
        said = client.responses.create(model=SERVED_NAME, input="x", tools=[tool], tool_choice=choice)
        assert said.output[-1].type == "computer_call"

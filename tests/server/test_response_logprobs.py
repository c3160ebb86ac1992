"""Log-probabilities in the Responses API: those of the tokens of the message's text, and of no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.scripted import SERVED_NAME, scripted_server
from tests.server.running import RunningServer
from tests.server.test_responses import GREEDY

INCLUDE: Any = ["message.output_text.logprobs"]
CALL = ["<tool_call>\n<function=look>\n", "<parameter=at>\nit\n</parameter>\n", "</function>\n</tool_call>"]
SCRIPTS = {
    "all": ["<think>", "I wonder", "</think>", "\n\n\n", "I ", "will ", "look.\n", *CALL],
    "stray": ["So it is\n", "</", "think>", "\nand ", "that is all"],
    "parts": ["🙂", "<tool", "_call> is a ", "tag"],
}
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("logprobs"), SCRIPTS) as running:
        yield running


def message_parts(items: list[Any]) -> list[dict[str, Any]]:
    return [part for item in items if item["type"] == "message" for part in item["content"]]


def asked(http: httpx2.Client, script: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The whole response, the same one streamed, and the events of the stream."""
    body = {"model": SERVED_NAME, "input": script, "temperature": 0, "tools": TOOLS, **fields}
    whole = http.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    lines = http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return whole.json(), events[-1]["response"], events


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        ("all", [["I ", "will ", "look.\n"]]),
        ("stray", [["So it is\n", "\nand ", "that is all"]]),
        ("parts", [["🙂", "<tool", "_call> is a ", "tag"]]),
    ],
)
def test_a_text_has_those_of_its_own_tokens(scripted: RunningServer, script: str, tokens: list[list[str]]) -> None:
    with scripted.client() as http:
        whole, streamed, events = asked(http, script, include=INCLUDE)
    for response in (whole, streamed):
        found = [[entry["token"] for entry in part["logprobs"]] for part in message_parts(response["output"])]
        assert found == tokens and response["top_logprobs"] == 0
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    done = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert [entry for logprobs in deltas for entry in logprobs] == [entry for logprobs in done for entry in logprobs]
    assert [[entry["token"] for entry in logprobs] for logprobs in done] == tokens


def test_they_are_those_of_the_chat(client: openai.OpenAI) -> None:
    said = client.responses.create(**GREEDY, input="What is a fork?", include=INCLUDE, top_logprobs=3)
    messages: Any = [{"role": "user", "content": "What is a fork?"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    [item] = said.output
    assert item.type == "message" and item.content[0].type == "output_text" and chat.choices[0].logprobs is not None
    found = [entry.model_dump() for entry in item.content[0].logprobs or ()]
    assert found == [entry.model_dump() for entry in chat.choices[0].logprobs.content or ()]
    assert "".join(entry["token"] for entry in found) == said.output_text and len(found[0]["top_logprobs"]) == 3


@pytest.mark.parametrize(
    ("fields", "num_top"), [({}, None), ({"include": []}, None), ({"top_logprobs": 0}, None), ({"top_logprobs": 2}, 2)]
)
def test_they_come_if_they_are_asked_for(client: openai.OpenAI, fields: dict[str, Any], num_top: int | None) -> None:
    said = client.responses.create(**GREEDY, input="x", **fields)
    assert said.output[0].type == "message" and said.output[0].content[0].type == "output_text"
    logprobs = said.output[0].content[0].logprobs
    assert logprobs is not None and bool(logprobs) == (num_top is not None)
    assert all(len(entry.top_logprobs) == num_top for entry in logprobs)


def test_a_message_with_them_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="x", top_logprobs=2)
    items: Any = [{"role": "user", "content": "x"}, *first.output, {"role": "user", "content": "y"}]
    again = client.responses.create(**GREEDY, input=items)
    continued = client.responses.create(**GREEDY, input="y", previous_response_id=first.id)
    assert again.output_text == continued.output_text

"""Reasoning as items of the Responses API, which clients send back in several forms."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from forkpoint.server.responses.items import messages_of
from tests.server.running import RunningServer
from tests.server.test_responses import GREEDY


def test_reasoning_is_an_item_and_comes_back(thinker: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="one", max_retries=0)
    answer = client.responses.create(**GREEDY, input="Think")
    [thought] = answer.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 12
    kinds = [event.type for event in client.responses.create(**GREEDY, input="Think", stream=True)]
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    items: list[Any] = [{"role": "user", "content": "Think"}, thought.model_dump(exclude_none=True)]
    told = client.responses.create(**GREEDY, input=[*items, {"role": "user", "content": "So?"}])
    without = client.responses.create(**GREEDY, input=[items[0], {"role": "user", "content": "So?"}])
    assert told.usage is not None and without.usage is not None
    assert told.usage.input_tokens >= without.usage.input_tokens + len(thought.content[0].text.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_store_nothing_send_reasoning_back(thinker: RunningServer, stream: bool) -> None:
    """Codex and the AI SDK send back the `encrypted_content` that they asked for, and nothing else of the reasoning."""
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="one", max_retries=0)
    fields: dict[str, Any] = {**GREEDY, "store": False, "include": ["reasoning.encrypted_content"]}
    if stream:
        events = list(client.responses.create(**fields, input="Think", stream=True))
        [thought] = [event.item for event in events if event.type == "response.output_item.done"]
        assert events[-1].type == "response.incomplete" and events[-1].response.output == [thought]
    else:
        [thought] = client.responses.create(**fields, input="Think").output
    assert thought.type == "reasoning" and thought.content and thought.encrypted_content
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    counts = []
    for item in (thought.model_dump(include={"type", "summary", "content"}), sealed):
        items: Any = [{"role": "user", "content": "Think"}, item, {"role": "user", "content": "So?"}]
        counts.append(client.responses.input_tokens.count(model="tiny", input=items).input_tokens)
    assert counts[0] == counts[1]
    [plain] = client.responses.create(**GREEDY, input="Think").output
    assert plain.type == "reasoning" and plain.encrypted_content is None


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_reasoning_is_a_summary_for_clients_that_ask_for_one(thinker: RunningServer, asked: str) -> None:
    """Codex and the AI SDK ask for it, and show nothing else. No client gets the same text under both names."""
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="one", max_retries=0)
    fields: dict[str, Any] = {**GREEDY, "input": "Think", "reasoning": {"summary": asked}}
    events = list(client.responses.create(**fields, stream=True))
    whole = client.responses.create(**fields)
    [thought] = whole.output
    assert thought.type == "reasoning"
    own, other = ("reasoning_summary_", "reasoning_") if asked == "auto" else ("reasoning_", "reasoning_summary_")
    parts, others = (thought.summary, thought.content) if asked == "auto" else (thought.content, thought.summary)
    part_event = "reasoning_summary_part" if asked == "auto" else "content_part"
    assert parts and not others and whole.reasoning is not None
    kinds = [f"{part_event}.added", f"{own}text.delta", f"{own}text.done", f"{part_event}.done"]
    found = [event for event in events if event.type.removeprefix("response.") in kinds]
    assert [event.type.removeprefix("response.") for event in found if not event.type.endswith(".delta")] == [
        kinds[0],
        *kinds[2:],
    ]
    deltas: list[Any] = [event for event in found if event.type.endswith(".delta")]
    assert "".join(event.delta for event in deltas) == parts[0].text
    assert all((event.summary_index if asked == "auto" else event.content_index) == 0 for event in deltas)
    assert not any(event.type == f"response.{other}text.delta" for event in events)
    [item] = [event.item for event in events if event.type == "response.output_item.done"]
    assert item.summary == thought.summary and item.content == thought.content
    counts = []
    for sent in (thought.model_dump(exclude_none=True), {"type": "reasoning", "content": [{"text": parts[0].text}]}):
        items: Any = [{"role": "user", "content": "Think"}, sent, {"role": "user", "content": "So?"}]
        counts.append(client.responses.input_tokens.count(model="tiny", input=items).input_tokens)
    assert counts[0] == counts[1]


def test_encrypted_reasoning_of_other_servers_is_left_out() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    assert messages_of([item], print)[0]["reasoning_content"] == ""

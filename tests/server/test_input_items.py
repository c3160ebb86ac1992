"""The items that a stored response answers, through the official client."""

from __future__ import annotations

from typing import Any, Literal

import httpx2
import openai
import pytest

from tests.server.running import RunningServer
from tests.server.test_responses import TOOLS

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 4}


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def test_a_text_is_a_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(**GREEDY, instructions="Be brief.", input="What is a fork?")
    page = client.responses.input_items.list(answer.id)
    [item] = page.data
    assert item.type == "message" and (item.role, item.status) == ("user", "completed")
    assert [part.to_dict() for part in item.content] == [{"type": "input_text", "text": "What is a fork?"}]
    assert page.to_dict() | {"data": []} == {
        "object": "list",
        "data": [],
        "first_id": item.id,
        "last_id": item.id,
        "has_more": False,
    }


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_all_pages_have_all_items_once(client: openai.OpenAI, order: Literal["asc", "desc"]) -> None:
    given: Any = [{"role": ("user", "assistant")[number % 2], "content": f"item {number}"} for number in range(23)]
    answer = client.responses.create(**GREEDY, input=given)
    wanted = [item["content"] for item in given]
    if order == "desc":
        wanted.reverse()
    else:
        assert len(client.responses.input_items.list(answer.id).data) == 20
    for limit in (1, 7, 23, 100):
        items = list(client.responses.input_items.list(answer.id, order=order, limit=limit))
        assert texts(items) == wanted
        assert len({item.id for item in items}) == 23
    page = client.responses.input_items.list(answer.id, order=order, limit=7)
    assert page.has_more and page.to_dict()["last_id"] == page.data[-1].id
    rest = client.responses.input_items.list(answer.id, order=order, limit=16, after=page.data[-1].id or "")
    assert not rest.has_more and texts(rest.data) == wanted[7:]
    empty = client.responses.input_items.list(answer.id, order=order, after=rest.data[-1].id or "")
    assert empty.data == [] and not empty.has_more


def test_items_are_as_they_were_given(client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "forecast", "arguments": '{"days": 1}', "id": "fc_mine"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    thought = {
        "type": "reasoning",
        "id": "rs_mine",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    }
    parts = [{"type": "input_text", "text": "Weather?"}, {"type": "input_text", "text": "And now?"}]
    given: Any = [
        {"role": "user", "content": parts},
        thought,
        call,
        result,
        call,
        {"role": "developer", "content": "x"},
    ]
    answer = client.responses.create(**GREEDY, input=given)
    found: Any = [item.to_dict() for item in client.responses.input_items.list(answer.id, order="asc")]
    assert [item["id"] for item in found[1:3]] == ["rs_mine", "fc_mine"]
    assert len({item["id"] for item in found}) == len(given)
    given[-1]["content"] = [{"type": "input_text", "text": "x"}]
    for item, own in zip(found, given, strict=True):
        assert item == {"type": "message", "status": "completed", **own, "id": item["id"]}


def test_a_response_answers_the_items_of_those_before_it(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="One")
    second = client.responses.create(
        **GREEDY, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id
    )
    third = client.responses.create(**GREEDY, input="Three", previous_response_id=second.id)
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert texts(items) == ["One", first.output_text, "Two", second.output_text, "Three"]
    earlier = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.id for item in items[:3]] == [item.id for item in earlier]
    assert (items[1].id, items[3].id) == (first.output[0].id, second.output[0].id)
    for name in (first.id, second.id):
        client.responses.delete(name)
    assert list(client.responses.input_items.list(third.id, order="asc")) == items


def test_an_input_item_can_be_referred_to(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="One")
    [item] = client.responses.input_items.list(first.id).data
    reference: Any = {"type": "item_reference", "id": item.id}
    again = client.responses.create(**GREEDY, input=[reference])
    assert again.output_text == first.output_text
    assert list(client.responses.input_items.list(again.id)) == [item]


def test_a_response_that_is_still_running_has_its_items(client: openai.OpenAI) -> None:
    begun = client.responses.create(**GREEDY, input="Wait", background=True)
    assert texts(client.responses.input_items.list(begun.id)) == ["Wait"]


@pytest.mark.parametrize(
    ("query", "status", "param", "said"),
    [
        ("limit=0", 400, "limit", "limit='0' is not allowed; give a number of at least 1"),
        ("limit=101", 400, "limit", "limit='101' is not allowed; give a number of at most 100"),
        ("limit=x", 400, "limit", "limit='x' is not allowed; give an integer"),
        ("order=up", 400, "order", "order='up' is not allowed; give 'asc' or 'desc'"),
        ("after=msg_1", 404, "after", "the response has no input item 'msg_1'"),
    ],
)
def test_a_wrong_page_is_refused(
    client: openai.OpenAI, http: httpx2.Client, query: str, status: int, param: str, said: str
) -> None:
    answer = client.responses.create(**GREEDY, input="x")
    reply = http.get(f"/v1/responses/{answer.id}/input_items?{query}")
    assert reply.status_code == status and reply.json()["error"]["param"] == param
    assert said in reply.json()["error"]["message"]


def test_only_stored_responses_of_ones_own_have_items(client: openai.OpenAI, thinker: RunningServer) -> None:
    unstored = client.responses.create(**GREEDY, input="x", store=False)
    for name in (unstored.id, "resp_1"):
        with pytest.raises(openai.NotFoundError, match="there is no response") as missing:
            client.responses.input_items.list(name)
        assert missing.value.code == "response_not_found"
    one, other = (openai.OpenAI(base_url=f"{thinker.url}/v1", api_key=key, max_retries=0) for key in ("one", "other"))
    mine = one.responses.create(**GREEDY, input="A secret")
    assert texts(one.responses.input_items.list(mine.id)) == ["A secret"]
    with pytest.raises(openai.NotFoundError):
        other.responses.input_items.list(mine.id)


def test_a_conversation_costs_the_same_linked_or_sent_again(client: openai.OpenAI) -> None:
    """What is stored becomes the same prompt as the items that the client has of it."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 80}
    first = client.responses.create(model="tiny", input="Weather?", **fields)
    [call] = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    linked = client.responses.create(**GREEDY, input=[result], previous_response_id=first.id)
    sent: Any = [item.to_dict() for item in client.responses.input_items.list(linked.id, order="asc")]
    again = client.responses.create(**GREEDY, input=sent)
    assert again.output_text == linked.output_text
    assert again.usage is not None and linked.usage is not None
    assert again.usage.input_tokens == linked.usage.input_tokens

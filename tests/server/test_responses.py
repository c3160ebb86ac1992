"""/v1/responses through the official client and openai-agents, beside the same model without a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import agents
import httpx2
import openai
import pydantic
import pytest

from forkpoint import LLM, SamplingParams
from forkpoint.server.responses.store import Key, ResponseStore, Stored
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.running import RunningServer
from tests.server.test_tool_calls import nested

DAYS: dict[str, Any] = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
DAYS["additionalProperties"] = False
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": DAYS, "strict": True} for name in ("forecast", "history")
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
END = "257"  # the id that ends an answer of the model under test
INSTRUCTIONS = "You answer briefly. " * 8


def expected(oracle: LLM, *messages: tuple[str, str]) -> Any:
    told = [{"role": role, "content": content} for role, content in messages]
    return oracle.chat(told, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]


def test_answers_are_those_of_the_engine(client: openai.OpenAI, oracle: LLM) -> None:
    whole = expected(oracle, ("system", INSTRUCTIONS), ("user", "What is a fork?"))
    items: list[Any] = [{"role": "developer", "content": INSTRUCTIONS}, {"role": "user", "content": "What is a fork?"}]
    for fields in ({"instructions": INSTRUCTIONS, "input": "What is a fork?"}, {"input": items}):
        answer = client.responses.create(**GREEDY, **fields)
        assert answer.output_text == whole.outputs[0].text
        assert answer.status == "incomplete" and answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None and answer.usage.input_tokens == len(whole.prompt_token_ids)
        assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (12, 0)
        assert answer.temperature == 0 and answer.max_output_tokens == 12


def test_a_response_says_how_it_was_sampled(http: httpx2.Client) -> None:
    """Clients of Open Responses expect all of these fields, and numbers in them."""
    given = {"top_p": 0.5, "presence_penalty": 1.5, "max_tool_calls": 3, "prompt_cache_key": "k"}
    body = {"input": "x", "structured_outputs": {"choice": ["ab"]}}
    plain, asked = (http.post("/v1/responses", json={**body, **fields}).json() for fields in ({}, given))
    assert plain["status"] == "completed" and plain["completed_at"] >= plain["created_at"]
    neutral = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    absent = dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier"))
    assert {name: plain[name] for name in neutral | absent} == neutral | absent
    assert {name: asked[name] for name in given} == given


def test_a_stream_says_the_same_in_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(**GREEDY, input="Stream this")
    events = list(client.responses.create(**GREEDY, input="Stream this", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    with client.responses.stream(**GREEDY, input="Stream this") as stream:
        final = list(stream)[-1]
    assert final.type == "response.incomplete" and final.response.output_text == whole.output_text


def test_a_stored_response_can_be_gone_on_from(client: openai.OpenAI, oracle: LLM) -> None:
    first = client.responses.create(**GREEDY, instructions="Only now.", input="Tell me about rivers, " * 8)
    second = client.responses.create(**GREEDY, input="Go on.", previous_response_id=first.id)
    whole = expected(
        oracle, ("user", "Tell me about rivers, " * 8), ("assistant", first.output_text), ("user", "Go on.")
    )
    assert second.output_text == whole.outputs[0].text and second.previous_response_id == first.id
    third = client.responses.create(**GREEDY, input="And?", previous_response_id=second.id)
    assert third.usage is not None and second.usage is not None
    cached = third.usage.input_tokens_details.cached_tokens
    assert cached >= (second.usage.input_tokens - 64) // 64 * 64 > 64
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text and again.usage == first.usage
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no response") as missing:
        client.responses.create(**GREEDY, input="x", previous_response_id=first.id)
    assert missing.value.code == "previous_response_not_found"
    assert client.responses.create(**GREEDY, input="x", previous_response_id=third.id).output_text
    unstored = client.responses.create(**GREEDY, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "history"}])
def test_tools_and_their_results(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 80}
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    with client.responses.stream(**fields, input=items) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
    [call] = answer.output
    assert call.type == "function_call" and answer.status == "completed"
    assert json.loads(call.arguments) in ({"days": 1}, {"days": 2}, {"days": 3})
    items += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    after = client.responses.create(model="tiny", input=items, tools=TOOLS[:1], max_output_tokens=4)
    linked = client.responses.create(
        model="tiny", input=items[-1:], previous_response_id=answer.id, tools=TOOLS[:1], max_output_tokens=4
    )
    assert after.usage is not None and linked.usage is not None
    assert after.usage.input_tokens == linked.usage.input_tokens


class Verdict(pydantic.BaseModel):
    answer: Literal["yes", "no"]


def test_parse_gives_a_checked_object(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="tiny", input="Yes or no?", text_format=Verdict, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Verdict)


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def test_the_background(server: RunningServer, client: openai.OpenAI) -> None:
    with stopped(server.engine_pid):  # it would say 400 tokens in less time than a busy machine needs to cancel them
        begun = client.responses.create(**GREEDY, input="Wait for me", background=True)
        assert begun.status == "queued" and begun.output == []
        with pytest.raises(openai.BadRequestError, match="no answer to go on from"):
            client.responses.create(**GREEDY, input="x", previous_response_id=begun.id)
        cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled" == client.responses.retrieve(begun.id).status
    short = client.responses.create(**GREEDY, input="Soon", background=True)
    deadline = time.monotonic() + 120
    while (now := client.responses.retrieve(short.id)).status == "queued" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert now.status == "incomplete" and now.output_text
    assert client.responses.cancel(short.id).status == "incomplete"


def test_a_stream_in_the_background_outlives_its_client(client: openai.OpenAI, http: httpx2.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": 60, "extra_body": {"ignore_eos": True}}
    seen: list[Any] = []
    with client.responses.create(**fields, input="Go on", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 5:
                break
    assert [event.sequence_number for event in seen] == [0, 1, 2, 3, 4]
    assert [seen[0].response.status, seen[1].response.status] == ["queued", "in_progress"]
    name = seen[0].response.id
    later = list(client.responses.retrieve(name, stream=True, starting_after=4))
    assert [event.sequence_number for event in later] == list(range(5, 5 + len(later)))
    last: Any = later[-1]
    assert last.type == "response.incomplete" and last.response == client.responses.retrieve(name)
    assert last.response.usage.output_tokens == 60
    again = list(client.responses.retrieve(name, stream=True))
    assert again == seen + later
    text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    assert http.get(f"/v1/responses/{name}", params={"stream": True, "starting_after": "x"}).status_code == 400


def test_a_stream_in_the_background_ends_when_it_is_cancelled(server: RunningServer, client: openai.OpenAI) -> None:
    with stopped(server.engine_pid):
        stream = client.responses.create(**GREEDY, input="Wait for me", background=True, stream=True)
        first: Any = next(iter(stream))
        client.responses.cancel(first.response.id)
        *_, last = stream
    event = last.model_dump()  # of a type that the client does not know
    assert event["type"] == "response.cancelled" and event["response"]["status"] == "cancelled"


def test_only_responses_that_stream_in_the_background_stream_later(client: openai.OpenAI) -> None:
    stored = client.responses.create(**GREEDY, input="x")
    with pytest.raises(openai.BadRequestError, match="created with background and stream"):
        client.responses.retrieve(stored.id, stream=True)


def test_what_a_cancelled_response_has_said_is_kept(client: openai.OpenAI) -> None:
    long: dict[str, Any] = {"model": "tiny", "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    wait_s = 0.05
    while True:
        begun = client.responses.create(**long, input="Go on for ever", background=True)
        time.sleep(wait_s)
        cancelled = client.responses.cancel(begun.id)
        if cancelled.usage is not None and cancelled.usage.output_tokens >= 30:
            break
        wait_s *= 2
        assert wait_s < 120
    assert cancelled.output_text and cancelled.output[-1].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text parts"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "there is no stored item 'msg_1'; send the item itself",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "needs its call_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "runs no tools, and all given tools (web_search)"),
        ({"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools.0.name"),
        ({"input": "x", "tools": [TOOLS[0], TOOLS[0]]}, "two tools are named 'forecast'"),
        ({"input": "x", "conversation": "c"}, "previous_response_id"),
        ({"input": "x", "logprobs": True}, "include with message.output_text.logprobs"),
        ({"input": "x", "top_logprobs": 21}, "at most 20"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x" * 600}, "context length is 512 tokens"),
        ({"input": "x", "user": "\ud800"}, "lone surrogate"),
        ({"input": "x", "metadata": nested(900)}, "metadata is nested more than 64"),
        ({"input": "x", "tools": [{**TOOLS[0], "parameters": nested(900)}], "tool_choice": "none"}, "tools is nested"),
    ],
)
def test_what_is_not_understood_is_said(http: httpx2.Client, fields: dict[str, Any], said: str) -> None:
    sent = json.dumps({"max_output_tokens": 2, **fields})
    reply = http.post("/v1/responses", content=sent, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("limit", [{}, {"max_output_tokens": None}])
def test_an_answer_without_a_limit_may_fill_the_context(http: httpx2.Client, limit: dict[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "x" * 400, "ignore_eos": True, **limit}).json()
    assert answer["status"] == "incomplete" and answer["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_a_client_that_leaves_ends_its_request(client: openai.OpenAI, http: httpx2.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**fields, input="Go on for ever", stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = http.get("/metrics").text.splitlines()
        if any(line.startswith("forkpoint_num_requests_open{") and line.endswith(" 0.0") for line in lines):
            return
    raise AssertionError("the request is still open")


def test_an_agent_calls_its_function(server: RunningServer) -> None:
    asked: list[int] = []

    @agents.function_tool
    def forecast(days: Literal[1, 2, 3]) -> str:
        """The weather of the next days."""
        asked.append(days)
        return "sun"

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as own:
            model = agents.OpenAIResponsesModel(model="tiny", openai_client=own)
            ends: dict[str, Any] = {"logit_bias": {END: 100}, "min_tokens": 3}  # a random model would not end
            settings = agents.ModelSettings(tool_choice="required", max_tokens=60, extra_body=ends)
            agent = agents.Agent(
                name="a", instructions="Be brief.", model=model, model_settings=settings, tools=[forecast]
            )
            whole = await agents.Runner.run(agent, "Weather?", max_turns=3)
            streamed = agents.Runner.run_streamed(agent, "Weather?", max_turns=3)
            kinds = [event.type async for event in streamed.stream_events()]
            return whole, streamed, kinds

    whole, streamed, kinds = asyncio.run(run())
    assert len(asked) == 2 and all(days in (1, 2, 3) for days in asked)
    for result in (whole, streamed):
        outputs = [item for item in result.new_items if item.type == "tool_call_output_item"]
        assert [item.output for item in outputs] == ["sun"]
        assert [item.type for item in result.new_items][-1] == "message_output_item" and result.final_output
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds


def test_an_item_of_a_stored_response_can_be_referred_to(client: openai.OpenAI, oracle: LLM) -> None:
    first = client.responses.create(**GREEDY, input="Tell me about rivers.")
    [item] = first.output
    assert item.id is not None
    reference: Any = {"type": "item_reference", "id": item.id}
    told: Any = [{"role": "user", "content": "Tell me about rivers."}, reference, {"role": "user", "content": "Go on."}]
    whole = expected(oracle, ("user", "Tell me about rivers."), ("assistant", first.output_text), ("user", "Go on."))
    assert client.responses.create(**GREEDY, input=told).output_text == whole.outputs[0].text
    assert client.responses.create(**GREEDY, input=[told[0], {"id": item.id}, told[2]]).output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no stored item"):
        client.responses.create(**GREEDY, input=told)


def test_nobody_finds_the_response_of_another_key(thinker: RunningServer) -> None:
    one, other = (openai.OpenAI(base_url=f"{thinker.url}/v1", api_key=key, max_retries=0) for key in ("one", "other"))
    mine = one.responses.create(**GREEDY, input="A secret")
    assert one.responses.retrieve(mine.id).id == mine.id
    for attempt in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(mine.id)
    references: Any = [{"type": "item_reference", "id": mine.output[0].id}, {"role": "user", "content": "x"}]
    assert one.responses.create(**GREEDY, input=references, store=False).output
    with pytest.raises(openai.BadRequestError, match="there is no stored item"):
        other.responses.create(**GREEDY, input=references)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        other.responses.create(**GREEDY, input="x", previous_response_id=mine.id)
    assert one.responses.retrieve(mine.id).id == mine.id
    for _ in range(2):
        other.responses.create(**GREEDY, input="push out")
    with pytest.raises(openai.NotFoundError, match="dropped for newer"):
        one.responses.retrieve(mine.id)


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    keys = [Key(b"me", str(number)) for number in range(5)]
    for key in keys[:4]:
        store.put(key, Stored(b"x" * 10, b"y" * 10, True))
    assert [store.get(key) is not None for key in keys] == [False, True, True, True, False]
    store.get(keys[1])
    store.put(keys[4], Stored(b"x" * 60, b"", True))
    assert [store.get(key) is not None for key in keys] == [False, True, False, True, True]
    store.put(keys[4], Stored(b"x" * 101, b"", True))
    assert [store.get(key) is not None for key in keys] == [False, True, False, True, False]
    store.drop(keys[1])
    store.drop(keys[1])
    store.put(keys[0], Stored(b"x" * 80, b"", True))
    assert [store.get(key) is not None for key in keys] == [True, False, False, True, False]
    assert store.get(Key(b"you", "0")) is None


def test_the_tokens_of_a_request_are_counted(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "instructions": INSTRUCTIONS, "tools": TOOLS[:1]}
    answer = client.responses.create(**fields, input="How long?", max_output_tokens=4)
    counted = client.responses.input_tokens.count(**fields, input="How long?")
    assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
    longer = client.responses.input_tokens.count(**fields, input="And?", previous_response_id=answer.id)
    assert longer.input_tokens > counted.input_tokens + len(answer.output_text.encode()) // 4
    assert client.responses.input_tokens.count(**fields, input="x" * 5000).input_tokens > MAX_MODEL_LEN


def test_compaction_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not compact conversations; ask for a summary"):
        client.responses.compact(model="tiny", input="x")


def test_a_forced_call_goes_before_a_format(http: httpx2.Client) -> None:
    """OpenAI holds texts alone to the format, and instructor gives both."""
    form = {"type": "json_schema", "name": "pet", "schema": {"type": "object", "additionalProperties": False}}
    fields = {"input": "x", "max_output_tokens": 80, "tools": TOOLS, "text": {"format": form}}
    answer = http.post("/v1/responses", json={**fields, "tool_choice": {"type": "function", "name": "history"}}).json()
    assert [(item["type"], item.get("name")) for item in answer["output"]] == [("function_call", "history")]


def test_an_image_in_a_result_does_not_end_a_conversation(server: RunningServer, http: httpx2.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}, image]}
    for _ in range(2):
        reply = http.post("/v1/responses", json={**GREEDY, "input": [{"role": "user", "content": "x"}, call, result]})
        assert reply.status_code == 200, reply.text
    assert server.log.count("results of tools have parts of the type 'image'") == 1

"""/v1/messages through Anthropic's own client, beside the same model without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import pytest

from forkpoint import LLM, SamplingParams
from forkpoint.server.chat.body import ChatBody, ChatMessage, ToolSpec
from forkpoint.server.chat.history import shown_messages
from forkpoint.server.chat.tools import plan_tools
from forkpoint.server.errors import HTTPError
from forkpoint.server.messages.body import MessagesBody, chat_fields
from forkpoint.server.messages.history import chat_messages
from tests.server.running import RunningServer

SYSTEM = "You answer briefly. " * 12
DAYS: dict[str, Any] = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
DAYS["additionalProperties"] = False
TOOLS: list[Any] = [{"name": name, "description": "x", "input_schema": DAYS} for name in ("forecast", "history")]
PDF: dict[str, Any] = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # which the client's own methods do not know


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": text}], **fields}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def ignore(text: str) -> None:
    """Take a notice without logging it."""


def test_answers_are_those_of_the_engine(client: anthropic.Anthropic, oracle: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a fork?"}]
    [expected] = oracle.chat(messages, params, use_tqdm=False)
    for system in (SYSTEM, [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]):
        answer = client.messages.create(**ask("What is a fork?", system=system, **GREEDY))
        assert text_of(answer) == expected.outputs[0].text
        assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
            "message",
            "assistant",
            "tiny",
            "max_tokens",
        )
        cached = answer.usage.cache_read_input_tokens or 0
        assert answer.usage.input_tokens + cached == len(expected.prompt_token_ids)
        assert answer.usage.output_tokens == 12 and answer.usage.cache_creation_input_tokens == 0


def test_models_and_requests_have_what_the_client_reads(client: anthropic.Anthropic) -> None:
    models = list(client.models.list())
    assert [(model.id, model.type, model.display_name) for model in models] == [
        (name, "model", name) for name in ("tiny", "alias")
    ]
    assert client.models.retrieve("alias") == models[1]
    assert models[0].max_input_tokens == 512 and models[0].created_at.tzinfo is not None
    assert client.models.list().has_more is False and client.models.list().last_id == "alias"
    named = client.messages.with_raw_response.create(**ask("x"), extra_headers={"X-Request-Id": "abc"})
    assert named.parse()._request_id == "abc"
    for wrong in (
        lambda: client.messages.create(**ask("x", stop_sequences=[5])),
        lambda: client.models.retrieve("no"),
    ):
        with pytest.raises(anthropic.APIStatusError) as refused:
            wrong()
        assert len(refused.value.request_id or "") == 32 and refused.value.body["type"] == "error"  # type: ignore[index]


def test_a_later_turn_reads_from_the_cache(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**ask("Tell me about rivers, " * 8, system="Rivers. " * 12, **GREEDY))
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Tell me about rivers, " * 8}]},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": "Go on."},
    ]
    second = client.messages.create(**ask("", system="Rivers. " * 12, **GREEDY) | {"messages": messages})
    before = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    cached = second.usage.cache_read_input_tokens
    assert cached is not None and cached >= (before - 64) // 64 * 64 > 64
    assert second.model_extra and second.model_extra["cache"]["num_tokens"] == cached


def test_a_stream_says_the_same_in_order(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ask("Stream this", **GREEDY))
    events = list(client.messages.create(**ask("Stream this", **GREEDY), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with client.messages.stream(**ask("Stream this", **GREEDY)) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole) and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**ask("Stop me", **GREEDY)))
    answer = client.messages.create(**ask("Stop me", **GREEDY, stop_sequences=["never", whole[4:7]]))
    assert text_of(answer) == whole[: whole.index(whole[4:7])]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", whole[4:7])


def test_the_answer_can_be_begun(client: anthropic.Anthropic, oracle: LLM) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two"}]
    answer = client.messages.create(**ask("", **GREEDY) | {"messages": messages})
    params = SamplingParams(temperature=0, max_tokens=12)
    [expected] = oracle.chat(messages, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert text_of(answer) == expected.outputs[0].text


def test_a_salt_keeps_prefixes_apart(client: anthropic.Anthropic) -> None:
    def num_cached(salt: str) -> int | None:
        extra = {**GREEDY["extra_body"], "cache_salt": salt}
        answer = client.messages.create(**ask("Who sees this? " * 20, **{**GREEDY, "extra_body": extra}))
        return answer.usage.cache_read_input_tokens

    assert num_cached("one") == 0 and num_cached("other") == 0
    assert num_cached("one")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "history"}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(client: anthropic.Anthropic, choice: Any, stream: bool) -> None:
    fields = ask("Weather?", tools=TOOLS, tool_choice=choice) | {"max_tokens": 80}
    pieces = list[str]()
    if stream:
        with client.messages.stream(**fields) as opened:
            pieces += [event.partial_json for event in opened if event.type == "input_json"]
            answer = opened.get_final_message()
    else:
        answer = client.messages.create(**fields)
    [call] = answer.content
    assert call.type == "tool_use" and answer.stop_reason == "tool_use"
    assert not stream or json.loads("".join(pieces)) == call.input
    assert call.name in ("forecast", "history") if choice["type"] == "any" else call.name == "history"
    assert call.input in ({"days": 1}, {"days": 2}, {"days": 3})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        *fields["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [{**result, "is_error": False}, {"type": "text", "text": "So?"}]},
    ]
    after = client.messages.create(**ask("") | {"messages": messages, "tools": TOOLS[:1], "max_tokens": 4})
    assert after.role == "assistant" and after.usage.output_tokens == 4


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    fields = ask("How long is this?", system=SYSTEM, tools=TOOLS[:1])
    del fields["max_tokens"]
    counted = client.messages.count_tokens(**fields)
    answer = client.messages.create(**fields, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_a_schema_for_the_answer(client: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    answer = client.messages.create(**ask("Yes or no?", output_config=config))
    assert json.loads(text_of(answer)) in ("yes", "no") and answer.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"compaction": {"type": "summarize"}}, "ask for a summary"),
        ({"mcp_servers": [{"name": "x"}]}, "runs no tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": TOOLS}, "nope"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]}, "pages as images"),
        ({"system": [{"type": "image", "source": {}}]}, "put 'image' blocks into messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context length is 512 tokens"),
        ({"thinking": {"type": "loud"}}, "thinking"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_have_the_form_of_this_api(client: anthropic.Anthropic, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ask("x"), extra_body=fields)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]


def test_a_model_that_is_not_there(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ask("x") | {"model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_a_client_that_leaves_ends_its_request(client: anthropic.Anthropic, http: httpx2.Client) -> None:
    with client.messages.stream(**ask("Go on for ever") | {"max_tokens": 400}) as stream:
        next(iter(stream))
    for _ in range(200):
        if "forkpoint_num_requests_open{" in (text := http.get("/metrics").text):
            line = next(line for line in text.splitlines() if line.startswith("forkpoint_num_requests_open{"))
            if line.endswith(" 0.0"):
                return
    raise AssertionError("the request is still open")


def test_thinking_is_told_where_it_is_asked_for(thinker: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=thinker.url, api_key="one", max_retries=0)
    [silent] = client.messages.create(**ask("Think")).content
    assert silent.type == "text"
    asked: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    [thought] = client.messages.create(**ask("Think", **asked)).content
    assert thought.type == "thinking" and thought.thinking
    with client.messages.stream(**ask("Think", **asked)) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_message().content
    assert streamed.type == "thinking" and "thinking" in kinds
    messages = [*ask("Think")["messages"], {"role": "assistant", "content": [thought.model_dump()]}]
    messages.append({"role": "user", "content": "So?"})
    without = client.messages.count_tokens(model="tiny", messages=[messages[0], messages[2]])
    told = client.messages.count_tokens(model="tiny", messages=messages)
    assert told.input_tokens >= without.input_tokens + len(thought.thinking.encode())


def test_the_key_comes_in_either_header(thinker: RunningServer) -> None:
    for options in ({"api_key": "one"}, {"auth_token": "one"}):
        client = anthropic.Anthropic(base_url=thinker.url, max_retries=0, **options)  # type: ignore[arg-type]
        assert client.messages.create(**ask("x")).role == "assistant"
    with pytest.raises(anthropic.AuthenticationError) as refused:
        anthropic.Anthropic(base_url=thinker.url, api_key="wrong", max_retries=0).messages.create(**ask("x"))
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@anthropic.beta_tool
def forecast() -> str:
    """The weather."""
    return "sun"


def test_the_tool_runner_of_the_official_client(client: anthropic.Anthropic) -> None:
    """It sends the new messages alone first, and the whole conversation once it hears that there are no threads."""
    asked: dict[str, Any] = ask("Weather?", max_tokens=80, tool_choice={"type": "any"})
    runner = client.beta.messages.tool_runner(**asked, tools=[forecast], max_iterations=3)
    answers = list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 3
    prompts = [each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in answers]
    assert prompts[0] < prompts[1] < prompts[2]


def test_threads_of_the_official_client_send_the_whole_conversation(client: anthropic.Anthropic) -> None:
    thread = client.beta.messages.thread(model="tiny", max_tokens=4)
    first = thread.send({"role": "user", "content": "One"})
    second = thread.send({"role": "user", "content": "Two"})
    assert second.usage.input_tokens > first.usage.input_tokens + len("Two")
    fields = {"thread": {"type": "continue", "previous_message_id": first.id}}
    with pytest.raises(anthropic.NotFoundError, match="send the whole conversation"):
        client.messages.create(**ask("x"), extra_body=fields)


def test_what_other_servers_have_is_taken(server: RunningServer, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"thread": {"type": "create"}, "billing_policy": {"type": "x"}, "max_token": 3}
    fields |= {"fallback_credit_token": "x", "verbosity": "low", "tools": [*TOOLS, {"type": "web_search", "name": "w"}]}
    messages = [{"role": "ctx", "content": "It rains."}, {"role": "user", "content": "hi"}]
    for _ in range(2):
        assert client.messages.create(**ask("x"), extra_body={**fields, "messages": messages}).usage.output_tokens
    for text in (
        "messages of the role 'ctx'",
        "did you mean 'max_tokens'?",
        "tools of the type 'web_search', which are",
    ):
        assert server.log.count(text) == 1


def prompt_of(http: httpx2.Client, messages: list[Any], **fields: Any) -> int:
    return int(http.post("/v1/messages/count_tokens", json={"messages": messages, **fields}).json()["input_tokens"])


def test_thinking_is_asked_for_in_any_way(thinker: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=thinker.url, api_key="one", max_retries=0)
    for fields in ({"enable_thinking": True}, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}):
        [block] = client.messages.create(**ask("Think"), extra_body=fields).content
        assert block.type == "thinking", fields
    for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):
        [block] = client.messages.create(**ask("Think"), extra_body=fields).content
        assert block.type == "text", fields


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"


def test_a_billing_line_is_no_part_of_the_prompt(client: anthropic.Anthropic, http: httpx2.Client) -> None:
    rivers = [{"type": "text", "text": "Rivers and bridges. " * 12}]
    asked = ask("How long?")["messages"]
    plain = prompt_of(http, asked, system=rivers)
    for head in ([BILLING.format(1)], [BILLING.format(1), BILLING.format("two")]):
        system = [*({"type": "text", "text": line} for line in head), *rivers]
        assert prompt_of(http, asked, system=system) == plain
    assert prompt_of(http, asked, system=BILLING.format(1)) == prompt_of(http, asked)
    assert prompt_of(http, asked, system=[*rivers, {"type": "text", "text": BILLING.format(1)}]) > plain
    usage = []
    for mark in ("1c0", "9f3"):
        system = [{"type": "text", "text": BILLING.format(mark)}, *rivers]
        usage.append(client.messages.create(**ask("How long?", system=system)).usage)
    assert usage[1].cache_read_input_tokens and usage[1].cache_read_input_tokens > plain // 2
    first = {"role": "system", "content": f"{BILLING.format(1)}\nRivers"}
    for content in (first["content"], [{"type": "text", "text": first["content"]}]):
        told = [{"role": "system", "content": content}, *asked]
        reply = http.post("/v1/chat/completions", json={"messages": told, "max_tokens": 1}).json()
        assert reply["usage"]["prompt_tokens"] == prompt_of(http, asked, system="Rivers")


def test_a_billing_line_can_be_kept() -> None:
    message = ChatMessage(role="system", content=BILLING)
    assert shown_messages([message], ignore, drops_billing_lines=False) == [{"role": "system", "content": BILLING}]
    assert shown_messages([message], ignore, drops_billing_lines=True) == []


RESULTS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "tool_reference", "tool_name": "Read"}], "The tool Read is available."),
    ([{"type": "image", "source": {}}], "[The tool returned a part of the type image, which cannot be shown here.]"),
    ([{"type": "document", "source": {"type": "text", "data": "Dear"}}], "Dear"),
    (
        [{"type": "document", "source": {"type": "content", "content": "Dear"}, "title": "T", "context": "C"}],
        "T\nC\nDear",
    ),
    ([{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Dear"}]}}], "Dear"),
    (
        [{"type": "document", "source": PDF}],
        "[The tool returned a part of the type document, which cannot be shown here.]",
    ),
    ([{"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "c"}]}], "T\nu\nc"),
]


@pytest.mark.parametrize(("blocks", "shown"), RESULTS)
def test_blocks_in_results_are_texts(blocks: list[Any], shown: str) -> None:
    text, notes = {"type": "text", "text": "a.png"}, list[str]()
    block = {"type": "tool_result", "tool_use_id": "t", "content": [text, *blocks]}
    [message] = chat_messages("user", [block], ignore)
    [told] = shown_messages([ChatMessage.model_validate(message)], notes.append, drops_billing_lines=True)
    content = told["content"]
    joined = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    assert joined == f"a.png\n{shown}" and len(notes) == ("cannot be shown" in shown)


def test_a_reference_shows_a_deferred_tool() -> None:
    message = {"role": "tool", "tool_call_id": "a", "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}
    messages = [ChatMessage.model_validate(message)]
    spec = {"name": "Fetch", "description": "x", "parameters": {"type": "object"}}
    for deferred, said in ((True, 'The tool Fetch is available:\n{"type": "function", "function": '), (False, "")):
        tools = [ToolSpec.model_validate({"type": "function", "function": spec, "defer_loading": deferred})]
        [shown] = shown_messages(messages, ignore, tools=tools, drops_billing_lines=True)
        [part] = shown["content"]
        assert part["text"] == (said + json.dumps(spec) + "}" if deferred else "The tool Fetch is available.")


ANY, FETCH = {"type": "any"}, {"type": "tool", "name": "Fetch"}


@pytest.mark.parametrize(
    ("choice", "deferred", "found", "callable_", "listed"),
    [
        (ANY, ["Fetch"], [], ["Read"], ["Read"]),
        (ANY, ["Fetch"], ["Fetch"], ["Fetch", "Read"], ["Read"]),
        (ANY, ["Fetch", "Read"], [], ["Fetch", "Read"], ["Fetch", "Read"]),
        (FETCH, ["Fetch"], [], ["Fetch"], ["Fetch", "Read"]),
        (FETCH, ["Fetch"], ["Fetch"], ["Fetch"], ["Read"]),
    ],
)
def test_a_forced_call_is_of_a_tool_in_the_prompt(
    choice: Any, deferred: list[str], found: list[str], callable_: list[str], listed: list[str]
) -> None:
    references = [{"type": "tool_reference", "tool_name": name} for name in found]
    messages = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": references}]}]
    tools: list[Any] = [
        {"name": name, "input_schema": {}, "defer_loading": name in deferred} for name in ("Fetch", "Read")
    ]
    fields = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, "tool_choice": choice}
    texts: Any = SimpleNamespace(relaxed=lambda schema, matching: schema)
    plan = plan_tools(texts, ChatBody.model_validate(chat_fields(MessagesBody.model_validate(fields), ignore)))
    assert plan.structured is not None and isinstance(schema := plan.structured.json, str)
    assert re.findall(r'"const": "(\w+)"', schema) == callable_
    assert [tool["function"]["name"] for tool in plan.shown or ()] == listed


def test_documents_and_search_results_are_texts() -> None:
    """The user's are read as a tool's are; a file is refused in clear words."""
    text = {"type": "text", "text": "a.png"}
    for blocks, shown in RESULTS:
        if "cannot be shown" not in shown and blocks[0]["type"] != "tool_reference":
            [message] = chat_messages("user", [text, *blocks], ignore)
            assert message == {"role": "user", "content": f"a.png\n{shown}"}
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    pages = {"type": "document", "title": "T", "source": {"type": "content", "content": [text, text, image, text]}}
    parts = [{"type": "text", "text": "T\na.png\na.png"}, image, text]
    assert chat_messages("user", [pages], ignore) == [{"role": "user", "content": parts}]
    files = (PDF, {"type": "url", "url": "https://a/b.pdf"}, {"type": "file", "file_id": "f"})
    inner = [{"type": "document", "source": PDF}]
    for source in (*files, {"type": "content", "content": inner}):
        with pytest.raises(HTTPError, match="files are not read; send the text, in a source of the type text"):
            chat_messages("user", [{"type": "document", "source": source}], ignore)


def test_a_result_with_an_image_does_not_end_a_session(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {"p": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [{"type": "image", "source": {}}]}
    records = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    messages = [*ask("hi")["messages"], {"role": "assistant", "content": [*records, call]}]
    messages += [{"role": "user", "content": [result]}]
    assert client.messages.create(**ask("") | {"messages": messages}).usage.output_tokens

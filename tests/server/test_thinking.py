"""Thinking in the three chat APIs: what stop strings concern, and an answer that goes on within it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.scripted import SERVED_NAME, chat_body, scripted_server
from tests.server.running import RunningServer

SCRIPTS = {
    "ponders": ["we ponder ", "END:\n\n", "again", "</think>", "\n\nAnswer: 4", " END", ": rest"],
    "opens": ["<think>", "hm END:", "\n</think>\n", "so it ", "is END: rest"],
    "thinks of json": ["Let me see: {", "\n\nthinks of json", "</think>", "\n\n", '{"a":', " 1}"],
    "opens json": ["<think>", "\nLet me see: {\n", "\nopens json", "</think>\n\n", '{ "a"', ": 2}"],
    "says json": ['{"a"', ": 3", "}"],
    "calls": ["I call f", "\n\n</think>\n\n", '{"name"', ': "f", "arguments": ', '{"a": 4}', "}"],
    "thinks and calls": [
        "I call f",
        "</think>\n\n",
        "<tool_call>",
        '{"name": "f"',
        ', "arguments"',
        ': {"a": 5}',
        "}</tool_call>",
    ],
    "calls at once": [
        "<tool_call>\n<function=f>\n",
        "<parameter=a>\n6\n",
        "</parameter>\n</function>\n",
        "</tool_call>\n",
    ],
    "does all at once": [
        "I call f twice</think>\n\nSo:\n"
        "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=f>\n<parameter=a>\n8\n</parameter>\n</function>\n</tool_call>"
    ],
    "thinks long": ["one ", "two ", "three ", "four</think>", "\n\nfive"],
    "answers": ["It is ", "six."],
    "says on": [" and so ", "it goes."],
    "goes on": [" so it is.", "\n</think>", "\n\nDone."],
}
STARTS, SAYS = "#", "%"  # end a message that the scripts "goes on" and "says on" go on with


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if not (continue_final_message and loop.last) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}{{ marker }}{% endif %}"
    )
    folder = tmp_path_factory.mktemp("thinking")
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    with scripted_server(
        folder,
        SCRIPTS,
        "--speculative-config",
        drafts,
        template=template,
        after={STARTS: "goes on", SAYS: "says on", "\n": "answers"},
    ) as running:
        yield running


@pytest.fixture
def http(scripted: RunningServer) -> Iterator[httpx2.Client]:
    with scripted.client() as client:
        yield client


def ask(http: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answer_of(http: httpx2.Client, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Content, reasoning and the (last) choice of a chat completion, streamed or not."""
    if body.get("stream"):
        events = http.post("/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        content, reasoning = ("".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning"))
        return content, reasoning, chunks[-1]["choices"][0]
    choice = ask(http, "/v1/chat/completions", body)["choices"][0]
    return choice["message"]["content"] or "", choice["message"]["reasoning"] or "", choice


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_of_chat_completions_concern_the_content(http: httpx2.Client, stream: bool) -> None:
    body = chat_body("ponders", stop=["END:", "\n\n"], stream=stream, chat_template_kwargs={"think": True})
    content, reasoning, ending = answer_of(http, body)
    assert (reasoning.strip(), content.strip()) == ("we ponder END:\n\nagain", "Answer: 4")
    assert (ending["finish_reason"], ending["stop_reason"]) == ("stop", "END:")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("budget", "expected"), [(2, ("one two", "It is six.")), (4, ("one two three four", "five"))])
def test_a_budget_ends_the_thinking(http: httpx2.Client, stream: bool, budget: int, expected: tuple[str, str]) -> None:
    think = {"think": True}
    body = chat_body("thinks long", stream=stream, thinking_token_budget=budget, chat_template_kwargs=think)
    content, reasoning, ending = answer_of(http, body)
    assert (reasoning.strip(), content, ending["finish_reason"]) == (*expected, "stop")
    turn = {"model": SERVED_NAME, "temperature": 0, "chat_template_kwargs": {"script": "thinks long", **think}}
    answer = ask(http, "/v1/responses", turn | {"input": "hello", "thinking_token_budget": budget})
    assert answer["output"][0]["content"][0]["text"].strip() == expected[0]
    turn |= {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    answer = ask(http, "/v1/messages", turn | {"thinking": {"type": "enabled", "budget_tokens": budget}})
    assert answer["content"][0]["thinking"].strip() == expected[0]


def usage_of(http: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    """Return the last usage that an answer reports, streamed or not."""
    if not body.get("stream"):
        return ask(http, path, body)["usage"]
    lines = http.post(path, json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [usage for event in events if (usage := (event.get("response") or event).get("usage"))][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "num_tokens"), [("ponders", 3), ("thinks long", 4), ("answers", 0)])
def test_three_apis_count_the_tokens_of_the_thinking(
    http: httpx2.Client, script: str, num_tokens: int, stream: bool
) -> None:
    think = {"script": script, "think": num_tokens > 0}
    turn = {"model": SERVED_NAME, "temperature": 0, "stream": stream, "chat_template_kwargs": think}
    messages = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    usage = usage_of(http, "/v1/chat/completions", turn | messages | options)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert usage_of(http, "/v1/responses", turn | {"input": "hello"})["output_tokens_details"] == {
        "reasoning_tokens": num_tokens
    }
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}):
        usage = usage_of(http, "/v1/messages", turn | messages | {"thinking": thinking})
        assert usage["output_tokens_details"] == {"thinking_tokens": num_tokens}


def test_stop_strings_wait_for_thinking_that_the_model_opens(http: httpx2.Client) -> None:
    message = ask(http, "/v1/chat/completions", chat_body("opens", stop=["END:", "\n"]))["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"].strip()) == ("hm END:", "so it is")


def test_stop_sequences_of_messages_concern_the_text(http: httpx2.Client) -> None:
    body = {"model": SERVED_NAME, "max_tokens": 50, "temperature": 0, "stop_sequences": ["END:"]}
    body["messages"] = [{"role": "user", "content": "opens"}]
    answer = ask(http, "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    thinking, text = answer["content"]
    assert (thinking["thinking"].strip(), text["text"].strip()) == ("hm END:", "so it is")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END:")


def test_stop_strings_of_plain_completions_concern_the_whole_text(scripted: RunningServer, http: httpx2.Client) -> None:
    body = {"model": SERVED_NAME, "prompt": STARTS, "max_tokens": 50, "temperature": 0, "stop": "is."}
    assert ask(http, "/v1/completions", body)["choices"][0]["text"] == " so it "


@pytest.mark.parametrize("parts", [False, True])
def test_an_answer_that_goes_on_within_thinking_is_reasoning(http: httpx2.Client, parts: bool) -> None:
    start: Any = "<think>\nI say" + STARTS
    if parts:
        start = [{"type": "text", "text": start}]
    messages = [{"role": "user", "content": "hi </think>"}, {"role": "assistant", "content": start}]
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"model": SERVED_NAME, "messages": messages, "temperature": 0, **ending}
    message = ask(http, "/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"].strip()) == ("so it is.", "Done.")


def test_an_answer_that_goes_on_after_thinking_is_content(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "<think>a</think>b" + SAYS}]
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"model": SERVED_NAME, "messages": messages, "temperature": 0, **ending}
    message = ask(http, "/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (" and so it goes.", None)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA | {"additionalProperties": False}}}


@pytest.mark.parametrize("script", ["thinks of json", "opens json", "says json"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_for_what_follows_the_thinking(http: httpx2.Client, script: str, stream: bool) -> None:
    think = script == "thinks of json"
    body = chat_body(script, response_format=FORMAT, stream=stream, chat_template_kwargs={"think": think})
    content, reasoning, ending = answer_of(http, body)
    assert reasoning.strip() == ("" if script == "says json" else f"Let me see: {{\n\n{script}")
    assert json.loads(content) == {"a": {"thinks of json": 1, "opens json": 2, "says json": 3}[script]}
    assert ending["finish_reason"] == "stop"


@pytest.mark.parametrize("script", ["thinks of json", "opens json", "says json", "thinks and calls", "calls at once"])
def test_an_answer_with_a_schema_and_tools_is_a_call_or_follows_the_schema(http: httpx2.Client, script: str) -> None:
    think = script.startswith("thinks")
    body = chat_body(script, response_format=FORMAT, tools=TOOLS, chat_template_kwargs={"think": think})
    content, _, ending = answer_of(http, body)
    calls = [json.loads(call["function"]["arguments"]) for call in ending["message"].get("tool_calls") or ()]
    found = calls or [json.loads(content)]
    values = {"thinks of json": 1, "opens json": 2, "says json": 3, "thinks and calls": 5, "calls at once": 6}
    assert found == [{"a": values[script]}]
    assert ending["finish_reason"] == ("tool_calls" if "calls" in script else "stop")
    assert bool(content) is not bool(calls)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_comes_after_the_thinking(http: httpx2.Client, choice: Any) -> None:
    body = chat_body("calls", tools=TOOLS, tool_choice=choice, chat_template_kwargs={"think": True})
    message = ask(http, "/v1/chat/completions", body)["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert message["reasoning"].strip() == "I call f"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 4})
    assert not message["content"]


def test_drafts_within_and_behind_the_thinking_change_nothing(http: httpx2.Client) -> None:
    def ask_again(*earlier: str) -> Any:
        body = chat_body("thinks of json", response_format=FORMAT, chat_template_kwargs={"think": True})
        body["messages"] = [{"role": "assistant", "content": text} for text in earlier] + body["messages"]
        return ask(http, "/v1/chat/completions", body)["choices"][0]["message"]

    said = "".join(SCRIPTS["thinks of json"])
    assert ask_again(said) == ask_again()  # lookups in the prompt find the thinking and the content


def test_a_chunk_has_one_kind_of_part_and_one_call_at_most(http: httpx2.Client) -> None:
    """llama-index and litellm's translation to Messages read only the first call of a chunk."""
    options = {"chat_template_kwargs": {"think": True}, "logprobs": True, "return_token_ids": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    reply = http.post("/v1/chat/completions", json=chat_body("does all at once", tools=tools, stream=True, **options))
    chunks = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks[1:] for choice in chunk["choices"]]
    kinds = [delta.keys() - {"reasoning_content"} for delta in (choice["delta"] for choice in choices) if delta]
    assert kinds == [{"reasoning"}, {"content"}, {"tool_calls"}, {"tool_calls"}], reply.text
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [(0, '{"a": 7}'), (1, '{"a": 8}')]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(len(choice["token_ids"]) for choice in choices) == 2  # the text, and the end
    assert sum(len(choice["logprobs"]["content"]) for choice in choices) == 2

"""Fields of requests are read, ignored with a line in the log, or refused; what real clients send is taken."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from openai.resources.responses import InputTokens, Responses

from forkpoint import LLM, SamplingParams
from forkpoint.obs.logs import LOGGER
from forkpoint.obs.notices import MAX_NOTICES, Notices
from forkpoint.server.chat.body import ChatBody, ChatMessage
from forkpoint.server.chat.history import shown_messages
from forkpoint.server.completions.body import CompletionBody
from forkpoint.server.messages.body import MessagesBody
from forkpoint.server.protocol import RequestBody
from forkpoint.server.responses.body import CountBody, ResponsesBody
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.running import RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(http: httpx2.Client, path: str, **fields: Any) -> httpx2.Response:
    given = {"prompt": "hello"} if path == TEXT else {"messages": MESSAGES}
    return http.post(path, json={"max_tokens": 3, **given, **fields})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_beam_search": True}, "give n for several"),
        ({"best_of": 3}, "give n"),
        ({"logprob_token_ids": [1]}, "logprobs"),
        ({"guided_whitespace_pattern": " ?"}, "disable_any_whitespace"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "exclude each other"),
        ({"prompt_embeds": "AAAA"}, "give text or token ids"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty is another name of repetition_penalty"),
        ({"regex": "a", "guided_choice": ["a"]}, "exclude each other"),
        ({"stop_regex": "a+"}, "give stop"),
        ({"lora_path": "mine"}, "adapters are not supported"),
        ({"response_format": {"type": "json_schema"}}, 'needs json_schema: {"name", "schema"}'),
        ({"stream_options": {"include_usage": True}}, "stream: true"),
        ({"stream": True, "prompt_logprobs": 1}, "not available in streams"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_is_not_read_is_refused(http: httpx2.Client, path: str, fields: dict[str, Any], said: str) -> None:
    reply = ask(http, path, **fields)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"separate_reasoning": False}, "--reasoning-parser none"),
        ({"input_ids": [1]}, "/v1/completions takes ids"),
        ({"function_call": {"name": "f"}}, "give functions"),
        ({"chat_template": "{{ 1 }}"}, "--chat-template"),
        ({"echo": True}, "continue_final_message"),
        ({"add_special_tokens": True}, "chat template"),
        ({"modalities": ["audio"]}, "text alone"),
        ({"audio": {"voice": "x"}}, "text alone"),
        ({"web_search_options": {"x": 1}}, "runs no tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not name 'tokenize'"),
        ({"chat_template_kwargs": {"messages": []}}, "may not name 'messages'"),
        ({"top_logprobs": 2}, "logprobs: true"),
    ],
)
def test_what_is_not_read_in_chat_is_refused(http: httpx2.Client, fields: dict[str, Any], said: str) -> None:
    reply = ask(http, CHAT, **fields)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


CREATE: list[tuple[type[RequestBody], Any]] = [
    (ChatBody, openai.resources.chat.Completions.create),
    (CompletionBody, openai.resources.Completions.create),
    (ResponsesBody, Responses.create),
    (CountBody, InputTokens.count),
    (MessagesBody, anthropic.resources.Messages.create),
    (MessagesBody, anthropic.resources.beta.Messages.create),
    (MessagesBody, anthropic.resources.beta.Messages.tool_runner),
]
# Arguments of the official clients that do not go into the body as they are.
NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
NOT_SENT |= {"betas", "max_iterations", "output_format", "run_tools_eagerly"}


def names_of(create: Any) -> set[str]:
    return inspect.signature(create).parameters.keys() - NOT_SENT


@pytest.mark.parametrize(("body", "create"), CREATE)
def test_every_field_of_the_official_clients_is_known(body: type[RequestBody], create: Any) -> None:
    """Each is read, has no effect, is ignored with a notice of its own, or is refused with what to do instead."""
    assert names_of(create) <= {*body.model_fields, *body.no_effect, *body.ignored, *body.refused}


NEEDED: dict[str, Any] = {"messages": MESSAGES, "prompt": "x", "input": "x", "max_tokens": 3}


@pytest.mark.parametrize(("body", "create"), CREATE)
def test_null_asks_for_nothing(body: type[RequestBody], create: Any) -> None:
    needed = {name: NEEDED[name] for name, field in body.model_fields.items() if field.is_required()}
    nulls = dict.fromkeys(names_of(create) | body.model_fields.keys() | body.refused.keys() | {"of_next_year"})
    read = body.model_validate({**nulls, **needed})
    assert read == body.model_validate(needed) and read.unused_fields() == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_has_no_meaning_is_ignored_and_logged_once(server: RunningServer, http: httpx2.Client, path: str) -> None:
    name = f"of_next_year_{path[-9:-1]}"
    for _ in range(3):
        fields = {name: 1, "temprature": 1, "thinking_token_budget": 5, "x" * 10_000: 1, "two\nlines": 1}
        assert ask(http, path, **fields).status_code == 200
    requests = f"requests to {path} have the field "
    assert server.log.count(f"{requests}'{name}', which is unknown there and ignored; /docs") == 1
    assert server.log.count(f"{requests}'temprature', which is unknown there and ignored; did you mean 'temp") == 1
    notice = "'thinking_token_budget', which is ignored; a text has no reasoning of its own"
    assert path == CHAT or server.log.count(notice) == 1
    assert server.log.count(f"{requests}'{'x' * 64}'") == 1
    assert "x" * 65 not in server.log and "two\nlines" not in server.log


def test_many_unknown_fields_take_no_time(http: httpx2.Client) -> None:
    begun = time.monotonic()
    assert ask(http, CHAT, **{f"unknown_{number}": 1 for number in range(16_000)}).status_code == 200
    assert time.monotonic() - begun < 20  # a look for near names among all of them would take minutes


def test_notices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(LOGGER, "log", lambda _, form, *values: logged.append(form % values))
    notices = Notices()
    for _ in range(2):
        for number in range(2 * MAX_NOTICES):
            notices.add(f"notice {number}")
    assert logged[:-1] == [f"notice {number}" for number in range(MAX_NOTICES)]
    assert logged[-1].startswith(f"requests had {MAX_NOTICES} different notices")


def test_thinking_parts_of_answers_become_their_reasoning() -> None:
    text = {"type": "text", "text": "Yes"}
    for part in (
        {"type": "thinking", "thinking": "Hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
        {"type": "reasoning", "reasoning": "Hm"},
        {"type": "reasoning", "text": "Hm"},
    ):
        message = ChatMessage(role="assistant", content=[part, {"type": "redacted_thinking", "data": "x"}, text])
        [shown] = shown_messages([message], lambda notice: None, drops_billing_lines=True)
        assert shown == {"role": "assistant", "content": [text], "reasoning_content": "Hm"}


def test_usage_in_openrouters_form(http: httpx2.Client) -> None:
    for wanted in (True, False):
        lines = ask(http, CHAT, stream=True, usage={"include": wanted}).text.splitlines()
        assert ('"usage":{' in "".join(lines).replace(" ", "")) is wanted


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "session_id": "s", "stream_interval": 2},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.5, "early_stopping": True, "do_sample": True},
        {"guided_decoding_backend": "xgrammar", "spaces_between_special_tokens": False, "cache_prompt": True},
        {"return_weight_versions": False, "structured_outputs": {"regex": "aaa", "whitespace_pattern": None}},
        {
            "logprob_token_ids": None,
            "kv_transfer_params": {"do_remote_decode": True},
            "guided_json": None,
            "truncation_side": "left",
        },
        {"repeat_penalty": 1.1, "max_new_tokens": 3, "no_stop_trim": True, "rid": "mine", "extra_key": "k"},
        {
            "separate_reasoning": True,
            "stream_reasoning": True,
            "lora_path": None,
            "repetition_penalty": 1,
            "regex": None,
        },
        {"n": 1, "stop": None, "seed": -5, "logit_bias": {}, "presence_penalty": 0, "stream": 0, "ignore_eos": 1},
        {"structured_outputs": {"choice": ["aa"], "json": None, "_backend": None}, "guided_choice": ["aa"]},
    ],
)
def test_what_clients_send_is_taken(http: httpx2.Client, path: str, fields: dict[str, Any]) -> None:
    reply = ask(http, path, **fields)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_numbers_and_truth_values_may_be_texts(http: httpx2.Client, path: str) -> None:
    plain = {"max_tokens": 4, "temperature": 0.5, "seed": 7, "n": 2, "top_k": 40, "ignore_eos": True, "stream": False}
    spelled = {"max_tokens": "4", "temperature": "5e-1", "seed": "7", "n": 2.0, "top_k": "40.0", "ignore_eos": "True"}
    replies = [ask(http, path, **fields).json()["choices"] for fields in (plain, {**spelled, "stream": "false"})]
    assert replies[0] == replies[1] and len(replies[0]) == 2
    wrong = {"temperature": "hot", "max_tokens": "3.5", "n": "", "stream": "yes", "ignore_eos": 2, "seed": "0x7"}
    for field in ({name: value} for name, value in wrong.items()):
        assert ask(http, path, **field).status_code == 400
    assert ask(http, path, stop="7").status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (CHAT, "n_predict"),
        (TEXT, "max_tokens"),
        (TEXT, "n_predict"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("value", [-1, "-1", 2**53 - 1])  # the last one is JavaScript's largest integer
def test_these_ask_for_no_limit(http: httpx2.Client, path: str, name: str, value: object) -> None:
    text = "x" * 400
    messages = [{"role": "user", "content": text}]
    given: dict[str, Any] = {CHAT: {"messages": messages}, TEXT: {"prompt": text}}.get(path, {"input": text})
    usage = http.post(path, json={**given, name: value, "ignore_eos": True}).json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN
    assert usage.get("completion_tokens", usage.get("output_tokens")) > 16  # the default of completions


def test_minus_one_asks_for_a_random_seed(http: httpx2.Client) -> None:
    texts = {
        seed: [ask(http, TEXT, seed=seed, max_tokens=30, ignore_eos=True).json()["choices"][0]["text"] for _ in "12"]
        for seed in (-1, -2)
    }
    assert texts[-1][0] != texts[-1][1] and texts[-2][0] == texts[-2][1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_empty_grammar_asks_for_none(http: httpx2.Client, path: str) -> None:
    for name in ("grammar", "ebnf", "regex", "json_schema", "guided_grammar", "guided_regex", "guided_json"):
        assert ask(http, path, **{name: ""}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_an_empty_text_stops_nothing(http: httpx2.Client, path: str, name: str) -> None:
    given: dict[str, Any] = {TEXT: {"prompt": "hello"}, "/v1/responses": {"input": "hello"}}.get(
        path, {"messages": MESSAGES}
    )
    for stop in ("", [""], [], ["", "~~"], [None], [None, "~~"]):
        reply = http.post(path, json={"max_tokens": 2, **given, name: stop})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_may_name_ids(http: httpx2.Client, stream: bool) -> None:
    """As vLLM writes them. Frameworks for reinforcement learning read ids from there."""
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0, "stream": stream}

    def choices(path: str, **more: Any) -> list[dict[str, Any]]:
        reply = ask(http, path, **fields, **more)
        if not stream:
            return [reply.json()["choices"][0]]
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        return [choice for event in events for choice in event["choices"] if choice["logprobs"]]

    ids, names, top = [], [], []
    for choice in choices(CHAT, logprobs=True, top_logprobs=1):
        ids += choice["token_ids"]
        names += [entry["token"] for entry in choice["logprobs"]["content"]]
        top += [entry["top_logprobs"][0]["token"] for entry in choice["logprobs"]["content"]]
    assert ids and names == top == [f"token_id:{token}" for token in ids]
    parts = choices(TEXT, logprobs=1, echo=True)
    ids = parts[0]["prompt_token_ids"] + [token for part in parts for token in part["token_ids"]]
    names = [token for part in parts for token in part["logprobs"]["tokens"]]
    assert names == [f"token_id:{token}" for token in ids]
    assert all(
        name in entry
        for part in parts
        for name, entry in zip(part["logprobs"]["tokens"], part["logprobs"]["top_logprobs"], strict=True)
        if entry
    )


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_server_may_name_ids_unless_a_request_asks_for_texts(thinker: RunningServer, asked: bool | None) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": asked}
    with thinker.client() as http:
        reply = http.post(TEXT, json=body, headers={"Authorization": "Bearer one"}).json()
    named = [token.startswith("token_id:") for token in reply["choices"][0]["logprobs"]["tokens"]]
    assert named == [asked is not False] * 2


def test_a_server_names_ids_in_responses_too(thinker: RunningServer) -> None:
    fields: dict[str, Any] = {"input": "hello", "max_output_tokens": 16, "top_logprobs": 1, "temperature": 0}
    fields["reasoning"] = {"effort": "none"}
    with thinker.client() as http:
        reply = http.post("/v1/responses", json=fields, headers={"Authorization": "Bearer one"}).json()
    entries = [entry for item in reply["output"] for part in item["content"] for entry in part["logprobs"]]
    assert entries and all(one["token"].startswith("token_id:") for e in entries for one in (e, *e["top_logprobs"]))


def test_no_functions_need_no_choice(http: httpx2.Client) -> None:
    assert ask(http, CHAT, functions=[], function_call="auto").status_code == 200
    assert "there are no functions" in ask(http, CHAT, functions=[], function_call={"name": "f"}).text


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
def test_a_top_p_of_zero_leaves_the_likeliest_token(http: httpx2.Client, path: str) -> None:
    """OpenAI and Anthropic take it."""
    given: dict[str, Any] = {TEXT: {"prompt": "hello"}, "/v1/responses": {"input": "hello"}}.get(
        path, {"messages": MESSAGES}
    )
    replies = [
        http.post(path, json={"max_tokens": 9, **given, **fields}).json()
        for fields in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0})
    ]
    first, second = [reply.get("choices") or reply.get("content") or reply["output"][0]["content"] for reply in replies]
    assert first == second


def test_the_type_of_a_function_may_be_missing(http: httpx2.Client) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 7}}}}
    choice = {"function": {"name": "f"}}
    typed = {"tools": [{"type": "function", "function": function}], "tool_choice": {"type": "function", **choice}}
    bare = {"tools": [{"function": function}], "tool_choice": choice}
    replies = [ask(http, CHAT, **fields, temperature=0, return_token_ids=True).json() for fields in (typed, bare)]
    assert replies[0]["prompt_token_ids"] == replies[1]["prompt_token_ids"]
    assert replies[0]["choices"][0]["token_ids"] == replies[1]["choices"][0]["token_ids"]


def test_mistrals_name_of_a_required_call(http: httpx2.Client) -> None:
    parameters = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    choice = ask(http, CHAT, tools=tools, tool_choice="any", max_tokens=60).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 7}'}
    assert ask(http, CHAT, tools=tools, tool_choice="some").status_code == 400


def test_neutral_values_of_chat_are_taken(http: httpx2.Client) -> None:
    neutral = {"modalities": ["text"], "function_call": "none", "functions": [], "audio": None, "verbosity": "low"}
    reply = ask(http, CHAT, **neutral, echo=False, add_special_tokens=False, parallel_tool_calls=True, top_logprobs=0)
    assert reply.status_code == 200, reply.text


def test_guided_fields_are_structured_outputs(http: httpx2.Client) -> None:
    for fields in (
        {"guided_choice": ["7"]},
        {"guided_regex": "7"},
        {"guided_json": {"const": 7}},
        {"guided_json": '{"const": 7}'},
        {"guided_grammar": 'root ::= "7"'},
        {"regex": "7"},
        {"ebnf": 'root ::= "7"'},
        {"grammar": 'root ::= "7"'},
        {"json_schema": '{"const": 7}'},
        {"guided_grammar": 'root ::= "7"', "structured_outputs": {"grammar": 'root ::= "7"'}},  # as guidance sends it
        {"response_format": {"type": "json_object", "schema": {"const": 7}}},
        {"response_format": {"type": "json_schema", "schema": {"const": 7}}},
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "7"}}},
    ):
        assert ask(http, TEXT, **fields).json()["choices"][0]["text"] == "7", fields
        assert ask(http, CHAT, **fields).json()["choices"][0]["message"]["content"] == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(client: openai.OpenAI, oracle: LLM, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer: Any = client.chat.completions.create(**options, stream=stream, extra_body={"return_token_ids": True})
    [expected] = oracle.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    chunks = list(answer) if stream else [answer]
    assert chunks[0].prompt_token_ids == list(expected.prompt_token_ids)
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    told = [token for chunk in chunks for choice in chunk.choices for token in choice.model_extra.get("token_ids", ())]
    assert told == list(expected.outputs[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_completions(client: openai.OpenAI, oracle: LLM, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 8, "temperature": 0}
    answer: Any = client.completions.create(**options, stream=stream, extra_body={"return_token_ids": True})
    expected = oracle.generate(["one", "two"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for index, output in enumerate(expected):
        own = [choice.model_extra for choice in choices if choice.index == index]
        assert [token for extra in own for token in extra["token_ids"]] == list(output.outputs[0].token_ids)
        prompts = [extra["prompt_token_ids"] for extra in own if extra.get("prompt_token_ids")]
        assert prompts == [list(output.prompt_token_ids)]


def test_prompt_logprobs(http: httpx2.Client, oracle: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    [chat] = oracle.chat(MESSAGES, params, use_tqdm=False)
    [text] = oracle.generate("hello", params, use_tqdm=False)
    told_chat = ask(http, CHAT, prompt_logprobs=2, temperature=0).json()["prompt_logprobs"]
    told_text = ask(http, TEXT, prompt_logprobs=2, temperature=0).json()["choices"][0]["prompt_logprobs"]
    for told, expected in ((told_chat, chat.prompt_logprobs), (told_text, text.prompt_logprobs)):
        assert expected is not None and len(told) == len(expected)
        for entry, one in zip(told, expected, strict=True):
            assert (entry is None) == (one is None)
            for token, logprob in (one or {}).items():
                found = entry[str(token)]
                assert found["rank"] == logprob.rank and found["decoded_token"] == logprob.decoded_token
                assert found["logprob"] == pytest.approx(logprob.logprob, abs=1e-4)
    assert "prompt_logprobs" not in json.dumps(ask(http, TEXT).json()).replace('"prompt_logprobs":null', "").replace(
        '"prompt_logprobs": null', ""
    )


def test_the_id_can_be_chosen(http: httpx2.Client) -> None:
    assert ask(http, CHAT, request_id="mine").json()["id"] == "chatcmpl-mine"
    assert ask(http, TEXT, request_id="mine").json()["id"] == "cmpl-mine"
    assert ask(http, CHAT, request_id="two lines\n").status_code == 400

"""Requests that are refused: the status, and a body that says what was given and what is allowed."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.server.running import RunningServer, start_server
from tests.server.test_connections import connect, read_all
from tests.server.test_lifecycle import wait_for

KEY = "a secret"
MAX_BODY_BYTES = 20_000
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys and small limits."""
    flags = ["--api-key", KEY, "another", "--max-body-bytes", str(MAX_BODY_BYTES), "--max-open-requests", "4"]
    flags += ["--max-queue-len", "1", "--max-num-seqs", "1", "--shutdown-timeout-s", "0.1"]
    flags += ["--max-stored-responses", "0"]
    running = start_server(tiny_model, tmp_path_factory.mktemp("guarded"), *flags)
    try:
        yield running.wait_ready()
        check_that_what_does_not_end_in_time_is_cut_off(running)
    finally:
        assert running.stop() == 0, running.log


def check_that_what_does_not_end_in_time_is_cut_off(guarded: RunningServer) -> None:
    """An answer, and a body that does not come."""
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    head = f"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with guarded.client() as http, connect(guarded) as slow:
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        wait_for(http, "forkpoint_num_requests_open{", 1)
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            lines = reply.iter_lines()
            next(lines)
            guarded.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        answer = read_all(slow)
    assert rest[-1] == "data: [DONE]" and "the server is shutting down" in rest[-2]
    assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in answer
    assert guarded.process.wait(120) == 0, guarded.log
    assert "stopping: 2 open requests cut off" in guarded.log and "Traceback" not in guarded.log, guarded.log


def chat(http: httpx2.Client, **fields: Any) -> httpx2.Response:
    return http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature=-1 is not allowed; give a number of at least 0"),
        ({"temperature": "hot"}, "temperature='hot' is not allowed; give a number"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_k": -7}, "top_k=-7 is not allowed"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages=[] is not allowed; give a list with a length of at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text parts"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"min_tokens": 5}, "min_tokens=5"),
        ({"cache_breakpoints": [9999]}, "9999"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context length is 512 tokens"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "lone surrogate U+D800"),
        ({"messages": [{"role": "user", "content": "a"}], "user": "\udfff"}, "lone surrogate U+DFFF"),
        ({"stop": "\ud800"}, "stop"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs: the lone surrogate"),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs: the lone surrogate"),
    ],
)
def test_wrong_values(http: httpx2.Client, fields: dict[str, Any], said: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, **fields}
    sent = json.dumps(body)  # in ASCII, which can tell of characters that there are not
    reply = http.post("/v1/chat/completions", content=sent, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("application/json", b'{"prompt": "x",}', "the body is not valid JSON: "),
        ("application/json", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "an integer has more than 4300 digits"),
        ("application/json", b'{"prompt": "x", "request_id": "\xed\xa0\x80"}', "byte 31 is not utf-8; send UTF-8"),
        ("application/json", '{"prompt": "x"}'.encode("utf-16"), "byte 0 is not utf-8; send UTF-8"),
        ("application/json", b'{"prompt": "x', "the body is not valid JSON: Unterminated string at character 11"),
        ("application/json", b'{"prompt": "x\n"}', "not valid JSON: Invalid control character at character 13"),
        ("application/json", b"", "the body is empty"),
        ("text/plain", b'{"prompt": "x"}', "the Content-Type is 'text/plain'; send a JSON"),
        ("", b'{"prompt": "x"}', "the Content-Type is ''; send a JSON object with"),
        ("application/json", b'{"prompt": [1, -1]}', "prompt.1=-1 is not allowed; give a number of at least 0"),
        ("application/json", b'{"prompt": ["a", 3]}', "prompt.1=3 is not allowed; give a string"),
        ("application/json", b'{"prompt": "a", "stop": 3}', "stop=3 is not allowed; give a string"),
        ("application/json", b"{}", "prompt is missing; give it"),
        ("application/json", b"[]", "the body [] is not allowed; give an object"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(http: httpx2.Client, content_type: str, body: bytes, said: str) -> None:
    reply = http.post("/v1/completions", content=body, headers={"Content-Type": content_type})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_paths_and_methods_that_are_not_there(http: httpx2.Client) -> None:
    missing, wrong = http.get("/v1/nowhere"), http.get("/v1/completions")
    assert missing.status_code == 404 and "no GET /v1/nowhere; /docs lists" in missing.json()["error"]["message"]
    assert wrong.status_code == 405 and "is not allowed; use POST" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # the client's base URL needs /v1
        ("/v1/v1/messages", "/v1/messages"),  # and here it may not have it
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("//v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/healthz", "/health"),
        ("/v1/messages/count-tokens", "/v1/messages/count_tokens"),
    ],
)
def test_a_path_that_is_nearly_right_is_named(http: httpx2.Client, path: str, meant: str) -> None:
    reply = http.post(f"{http.base_url}".rstrip("/") + path, json={})
    assert reply.status_code == 404 and f"there is no POST {path}; did you mean {meant}?" in reply.text


def test_a_compressed_body_is_refused_by_its_encoding(http: httpx2.Client) -> None:
    body, headers = gzip.compress(b'{"prompt": "x"}'), {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "the Content-Encoding is 'gzip'; send the body without compression"
    same = {**headers, "Content-Encoding": "identity"}
    assert http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=same).status_code == 200


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/reset_prefix_cache", "--enable-dev-endpoints"),
        ("/check_integrity", "--enable-dev-endpoints"),
        ("/tokenizer_info", "--enable-tokenizer-info-endpoint"),
        ("/prefix/v1/chat/completions", "--kv-events-config"),
        ("/prefix/v1/responses", "--kv-events-config"),
    ],
)
def test_a_path_that_a_flag_adds_is_answered_with_the_flag(guarded: RunningServer, path: str, flag: str) -> None:
    with guarded.client() as http:
        reply = http.post(path, json={}, headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 404
    assert f"there is no POST {path} without {flag}; start the server with it" in reply.json()["error"]["message"]


def test_a_server_that_stores_no_responses_names_the_flag(guarded: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=r"stores no responses.*--max-stored-responses"):
        client.responses.create(input="x", background=True)
    with pytest.raises(openai.NotFoundError, match=r"stores no responses.*--max-stored-responses"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match=r"stores no responses.*--max-stored-responses"):
        client.responses.create(input="x", previous_response_id="resp_1")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b'{"messages": 1e999}', b"[" * 100_000])
def test_bodies_that_are_no_request(http: httpx2.Client, body: bytes) -> None:
    reply = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_the_client_raises_its_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist") as missing:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="token id 70000 is unknown"):
        client.completions.create(model="tiny", prompt=[70000])
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="best_of is not supported; give n"):
        client.completions.create(model="tiny", prompt="x", best_of=3)
    with pytest.raises(openai.BadRequestError, match="is empty"):
        client.completions.create(model="tiny", prompt=[])


def test_unknown_paths_and_methods(http: httpx2.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("prompt", "x" * 600, "600 tokens > 511 maximum"),
        ("prompt", "x" * 200_000, "200000 characters > "),
        ("prompt", [1] * 512, "512 tokens > 511 maximum"),
        ("messages", [{"role": "user", "content": "x" * 600}], " tokens > 511 maximum"),
        ("messages", [{"role": "user", "content": "x" * 200_000}], " characters > "),
        ("messages", MESSAGES * 513, "513 messages > 512 maximum"),
        ("input", "x" * 600, " tokens > 511 maximum"),
    ],
)
def test_agents_see_that_a_prompt_is_too_long(http: httpx2.Client, field: str, given: Any, said: str) -> None:
    """They know OpenAI's code or words, or Anthropic's words, and shorten the conversation then.

    Some read the numbers too: Qwen Code and Crush those of OpenAI's words, Claude Code those of Anthropic's.
    """
    paths = {"prompt": ["/v1/completions"], "messages": ["/v1/chat/completions", "/v1/messages"]}
    for path in paths.get(field, ["/v1/responses"]):
        reply = http.post(path, json={"max_tokens": 2, field: given})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["type"] == "invalid_request_error"
        assert "prompt is too long: " in error["message"] and said in error["message"]
        assert path == "/v1/messages" or error["code"] == "context_length_exceeded"
        numbers = re.search(r"maximum context length is (\d+) tokens.* resulted in (\d+) tokens", error["message"])
        assert numbers is not None and numbers[1] == "512" and int(numbers[2]) >= 512


def test_a_key_is_asked_for(guarded: RunningServer) -> None:
    with guarded.client() as http:
        for headers, said in (
            ({}, "this server needs an API key; send"),
            ({"Authorization": "Bearer wrong"}, "this server does not know the API key that was sent; send"),
            ({"x-api-key": "wrong"}, "this server does not know the API key that was sent; send"),
            ({"Authorization": KEY}, "this server needs an API key; send"),
        ):
            reply = http.get("/v1/models", headers=headers)
            assert reply.status_code == 401 and said in reply.json()["error"]["message"]
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert http.post("/tokenize", json={"prompt": "x"}, headers=headers).status_code == 401
        for path in ("/health", "/ping", "/metrics", "/version", "/"):
            assert http.get(path).status_code == 200
        assert http.post("/ping").status_code == 200
        assert http.get("/v1/models", headers={"Authorization": "Bearer another"}).status_code == 200
        assert http.get("/v1/models", headers={"Authorization": "bearer another"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY).models.list().data
    assert KEY not in guarded.log


def test_large_bodies_are_refused_with_and_without_a_length(guarded: RunningServer) -> None:
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with guarded.client() as http:
        declared = http.post("/v1/completions", content=large, headers=headers)
        streamed = http.post("/v1/completions", content=iter([large[:9000], large[9000:]]), headers=headers)
    for reply in (declared, streamed):
        assert reply.status_code == 413
        assert f"max_body_bytes={MAX_BODY_BYTES}" in reply.json()["error"]["message"]


def test_beyond_the_limits_requests_are_told_to_come_back(guarded: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(_: int) -> httpx2.Response:
        with guarded.client() as http:
            return http.post("/v1/completions", json=body, headers=headers)

    with ThreadPoolExecutor(9) as pool:
        replies = list(pool.map(ask, range(9)))
    refused = [reply for reply in replies if reply.status_code == 429]
    served = [reply for reply in replies if reply.status_code == 200]
    assert refused and served and len(refused) + len(served) == 9
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
    said = " ".join(reply.json()["error"]["message"] for reply in refused)
    assert "max_open_requests=4" in said or "max_queue_len=1" in said
    assert all(reply.json()["usage"]["completion_tokens"] == 300 for reply in served)


def test_requests_for_several_prompts_are_refused_as_a_whole(guarded: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with guarded.client() as http:
        reply = http.post("/v1/completions", json={"prompt": ["x"] * 4, "max_tokens": 50}, headers=headers)
        assert reply.status_code == 429 and "max_queue_len" in reply.json()["error"]["message"]
        reply = http.post("/v1/completions", json={"prompt": ["x"] * 2, "n": 3, "max_tokens": 50}, headers=headers)
        assert reply.status_code == 400 and "6 completions, more than max_open_requests=4" in reply.text
        many = json.dumps({"prompt": ["x"] * 1300}).encode()
        reply = http.post("/v1/completions", content=many, headers={**headers, "Content-Type": "application/json"})
        assert reply.status_code == 400 and "1300 completions, more than" in reply.text
        assert "forkpoint_num_requests_open{" in http.get("/metrics").text
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers).status_code == 200


def test_a_conversation_of_unknown_items_alone_is_refused_by_their_types(client: openai.OpenAI) -> None:
    items: list[Any] = [{"type": "web_search_call", "id": "ws_1"}, {"type": "other"}]
    with pytest.raises(openai.BadRequestError, match=r"no item of input is understood \(other, web_search_call\)"):
        client.responses.create(model="tiny", input=items)
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.responses.create(model="tiny", input=[])

"""What a client sees of drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MAX_MODEL_LEN
from tests.server.running import RunningServer, start_server

CONFIG = '{"method": "cache", "num_speculative_tokens": 3}'
ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
CHAT = {**ASK, "messages": [{"role": "user", "content": "again and again and again"}]}


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    flags = ["--served-model-name", "tiny", "--max-model-len", str(MAX_MODEL_LEN), "--speculative-config", CONFIG]
    running = start_server(tiny_model, tmp_path_factory.mktemp("drafting"), *flags)
    try:
        with running.wait_ready().client() as client:
            yield client
    finally:
        assert running.stop() == 0, running.log


def ask(http: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
    return answer


def events(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json={**body, "stream": True}).raise_for_status().text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def check(told: dict[str, int], num_outputs: int) -> None:
    assert told.keys() == {"num_draft_tokens", "num_accepted_tokens"}
    assert 0 < told["num_accepted_tokens"] <= told["num_draft_tokens"] and told["num_accepted_tokens"] < num_outputs


def test_answers_tell_what_became_of_drafts(drafting: httpx2.Client, server: RunningServer) -> None:
    with server.client() as plain:
        wanted = ask(plain, "/v1/chat/completions", CHAT)
        assert wanted["speculation"] is None
        assert all("speculation" not in chunk for chunk in events(plain, "/v1/chat/completions", CHAT))
    first = ask(drafting, "/v1/chat/completions", CHAT)
    again = ask(drafting, "/v1/chat/completions", CHAT)
    check(again["speculation"], 80)  # from the answer to the first
    for answer in (first, again):
        assert answer["choices"][0]["message"] == wanted["choices"][0]["message"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = events(drafting, "/v1/chat/completions", {**CHAT, **options})
        check(chunks[-1]["speculation"], 80)
        assert all("speculation" not in chunk for chunk in chunks[:-1])


def test_counts_are_those_of_all_completions_and_reach_a_stop_string(drafting: httpx2.Client) -> None:
    body = {**ASK, "prompt": "over and over and over", "n": 2}
    ask(drafting, "/v1/completions", body)
    both = ask(drafting, "/v1/completions", body)
    check(both["speculation"], 160)
    text = both["choices"][0]["text"]
    part = ask(drafting, "/v1/completions", {**body, "n": 1, "stop": [text[60:64]]})
    assert text.startswith(part["choices"][0]["text"]) and part["choices"][0]["finish_reason"] == "stop"
    assert part["speculation"]["num_accepted_tokens"] > 0  # told as they come: the engine does not know this end


def counted(http: httpx2.Client) -> dict[str, float]:
    """What /metrics has of drafts, by vLLM's names; of those by position, the position behind them."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples if family.name.startswith("forkpoint_spec_decode_") else ():
            found[sample.name.removeprefix("forkpoint_spec_decode_") + sample.labels.get("position", "")] = sample.value
    return found


def test_metrics_count_what_answers_tell(drafting: httpx2.Client) -> None:
    ask(drafting, "/v1/chat/completions", CHAT)
    before = counted(drafting)
    told = ask(drafting, "/v1/chat/completions", CHAT)["speculation"]
    after = counted(drafting)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["num_draft_tokens_total"] == told["num_draft_tokens"]
    assert grown["num_accepted_tokens_total"] == told["num_accepted_tokens"]
    by_position = [grown.get(f"num_accepted_tokens_per_pos_total{position}", 0) for position in range(3)]
    assert by_position == sorted(by_position, reverse=True) and sum(by_position) == told["num_accepted_tokens"]
    assert by_position[0] <= grown["num_drafts_total"] <= told["num_draft_tokens"]


def test_other_apis_tell_it_too(drafting: httpx2.Client) -> None:
    ask(drafting, "/v1/chat/completions", CHAT)
    body = {name: CHAT[name] for name in ("model", "temperature", "messages", "max_tokens")}
    message = ask(drafting, "/v1/messages", body)
    assert message["speculation"]["num_draft_tokens"] > 0
    deltas = [event for event in events(drafting, "/v1/messages", body) if event["type"] == "message_delta"]
    assert deltas[0]["speculation"]["num_draft_tokens"] > 0
    body = {"input": body["messages"], "temperature": 0, "max_output_tokens": 80}
    response = ask(drafting, "/v1/responses", body)
    assert response["speculation"]["num_draft_tokens"] > 0
    *before, last = events(drafting, "/v1/responses", body)
    assert last["response"]["speculation"]["num_draft_tokens"] > 0
    assert not any("speculation" in event.get("response", {}) for event in before)


@pytest.mark.parametrize("echo", [False, True])
def test_completions_are_those_without_drafts(drafting: httpx2.Client, server: RunningServer, echo: bool) -> None:
    """Whole and streamed, with the log-probabilities of all tokens."""
    body = {**ASK, "prompt": ["to and fro and to and fro", "now and then and now"], "logprobs": 2, "echo": echo}
    ask(drafting, "/v1/completions", body)
    with server.client() as plain:
        wanted, found = (ask(http, "/v1/completions", body) for http in (plain, drafting))
    check(found["speculation"], 160)
    for mine, other in zip(found["choices"], wanted["choices"], strict=True):
        assert (mine["text"], mine["finish_reason"]) == (other["text"], other["finish_reason"])
        assert mine["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        pairs = zip(mine["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
        assert all(a is b is None or a == pytest.approx(b, abs=1e-3) for a, b in pairs)
    chunks = events(drafting, "/v1/completions", body)
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    for mine in found["choices"]:
        parts = [choice for choice in told if choice["index"] == mine["index"]]
        assert "".join(part["text"] for part in parts) == mine["text"]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == mine["logprobs"]["tokens"]
    check(chunks[-1]["speculation"], 160)

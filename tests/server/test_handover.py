"""Two servers as a prefill/decode pair, with the requests that vLLM's toy proxy, llm-d's sidecar and Dynamo send."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forkpoint.peer.protocol import COPIES_WAIT_S
from tests.server.running import start_server

LINK = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"fetch_timeout_s": 30}}
FLAGS = ("--served-model-name", "tiny", "--deterministic", "--num-threads", "1", "--max-model-len", "768")
# The fields that all these proxies send to the prefill engine.
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TEXT, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
PROMPT = "a prompt that is long enough for a few blocks. " * 6
P2P = {"kv_request_id": "5d0e", "remote_host": "127.0.0.1", "remote_port": 7777}


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[httpx2.Client]]:
    """Two servers, each of which can be either half."""
    folder, link = tmp_path_factory.mktemp("pair"), ("--kv-transfer-config", json.dumps(LINK))
    running = [start_server(tiny_model, folder, *FLAGS, *link, name=name) for name in ("first", "second")]
    try:
        with ExitStack() as clients:
            yield [clients.enter_context(server.wait_ready().client()) for server in running]
    finally:
        assert [server.stop() for server in running] == [0, 0], [server.log for server in running]


@dataclass(frozen=True)
class Proxy:
    """What a proxy changes in a client's body for the prefill server. `limits` are set to 1 where the API has them."""

    limits: tuple[str, ...]
    drops: tuple[str, ...] = ("stream_options",)
    min_tokens: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        half = {name: value for name, value in body.items() if name not in self.drops}
        names = self.limits
        if path == RESPONSES:
            names = ("max_output_tokens",)
        half |= dict.fromkeys(names, 1) | {"stream": False, "kv_transfer_params": {**ASKS, **self.more}}
        if self.min_tokens is not None:
            half["min_tokens"] = self.min_tokens
        return half


PROXIES = {
    "vLLM's toy proxy": Proxy(("max_tokens",)),
    "llm-d": Proxy(("max_tokens", "max_completion_tokens"), ("stream_options", "min_tokens")),
    "llm-d with a peer's cache": Proxy(("max_tokens",), more={"remote_kv_source": P2P}),
    "llm-d before 2026": Proxy(("max_tokens", "max_completion_tokens")),  # the client's min_tokens stay
    "Dynamo": Proxy(("max_tokens",), min_tokens=1, more={"kv_hint": {"any": [1]}}),
}


def request_of(path: str, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    if path == RESPONSES:
        return {**body, "input": prompt, "max_output_tokens": 8, "store": False}
    if path == TEXT:
        return {**body, "prompt": prompt, "max_tokens": 8, "min_tokens": 5}
    return {**body, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}


def answer_of(path: str, reply: dict[str, Any]) -> Any:
    if path == RESPONSES:
        return [item["content"][0]["text"] for item in reply["output"]]
    if path == MESSAGES:
        return [block["text"] for block in reply["content"]]
    return [choice.get("text") or choice["message"]["content"] for choice in reply["choices"]]


def post(http: httpx2.Client, path: str, body: dict[str, Any], name: str = "r") -> dict[str, Any]:
    """Post as Go's proxies do: sorted keys, and a second X-Request-Id next to the client's."""
    headers = [("Content-Type", "application/json"), ("X-Request-Id", "client's"), ("X-Request-Id", name)]
    reply = http.post(path, content=json.dumps(body, sort_keys=True), headers=headers)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    ("proxy", "path"),
    [
        *((proxy, TEXT) for proxy in PROXIES),
        ("llm-d", CHAT),
        ("llm-d with a peer's cache", MESSAGES),
        ("llm-d", RESPONSES),
    ],
)
def test_a_proxy_splits_a_request(servers: list[httpx2.Client], proxy: str, path: str) -> None:
    prefill, decode = servers
    body = request_of(path, f"{proxy} {path} " + PROMPT)
    offered = post(prefill, path, PROXIES[proxy].prefill(path, body), "a")["kv_transfer_params"]
    assert offered["do_remote_prefill"] is True and offered["do_remote_decode"] is False
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        assert isinstance(offered[name], str) and offered[name]
    assert offered["remote_port"] > 0 and offered["remote_num_tokens"] >= 64 and offered["tp_size"] == 1
    found = post(decode, path, {**body, "kv_transfer_params": offered}, "a")
    assert found["cache"]["num_peer_tokens"] == offered["remote_num_tokens"]
    plain = post(prefill, path, body)
    assert plain.get("kv_transfer_params") is None
    assert answer_of(path, found) == answer_of(path, plain)
    again = post(decode, path, {**body, "kv_transfer_params": offered}, "a")  # a proxy that tries again
    assert answer_of(path, again) == answer_of(path, plain)


def test_the_decode_server_streams(servers: list[httpx2.Client]) -> None:
    decode, prefill = servers
    body = {**request_of(TEXT, "streamed " + PROMPT), "stream": True, "stream_options": {"include_usage": True}}
    half = post(prefill, TEXT, PROXIES["llm-d"].prefill(TEXT, body))
    assert half["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "llm-d reports these"
    lines = decode.post(TEXT, json={**body, "kv_transfer_params": half["kv_transfer_params"]}).text
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    cache = next(chunk["cache"] for chunk in chunks if chunk.get("cache"))
    assert cache["num_peer_tokens"] == cache["num_restored_tokens"] == cache["num_tokens"] >= 64
    assert [text] == answer_of(TEXT, post(prefill, TEXT, request_of(TEXT, "streamed " + PROMPT)))
    assert b"forkpoint_peer_hits_total" in decode.get("/metrics").content


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kv_transfer_params": None}, {"kv_transfer_params": None}),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1795900800000000001},) * 2,
        ({"cache_hit_threshold": 0}, {"cache_hit_threshold": 0.5}),
        (
            {"kv_transfer_params": {"remote_decoder": {"kv_request_id": "5d0e"}}},
            {"kv_transfer_params": {"remote_prefiller": P2P}},
        ),
        ({"kv_transfer_params": {**ASKS, "transfer_id": "t"}}, {"kv_transfer_params": {**ASKS, "transfer_id": "t"}}),
        (
            {},
            {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "remote_block_ids": [1, 2],
                    "remote_engine_id": "vllm",
                    "remote_host": "127.0.0.1",
                    "remote_port": 5600,
                }
            },
        ),
    ],
    ids=["LMCache", "SGLang", "shared storage", "peer-to-peer", "Mooncake", "vLLM's engine"],
)
def test_other_transfers_give_whole_answers(
    servers: list[httpx2.Client], first: dict[str, Any], second: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Both halves of a transfer that this server does not have compute the prompt."""
    prefill, decode = servers
    body = request_of(CHAT, request.node.name + PROMPT)
    half = {**body, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, **first}
    assert len(answer_of(CHAT, post(prefill, CHAT, half))) == 1
    whole = answer_of(CHAT, post(prefill, CHAT, body))
    assert answer_of(CHAT, post(decode, CHAT, {**body, **second})) == whole


@pytest.mark.parametrize("is_first", [False, True], ids=["asked before", "asked after"])
@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"guided_regex": "("}], ids=["malformed", "refused later"])
def test_a_decode_server_learns_that_a_prompt_is_refused(
    servers: list[httpx2.Client], wrong: dict[str, Any], is_first: bool
) -> None:
    prefill, decode = servers
    place = post(prefill, TEXT, PROXIES["llm-d"].prefill(TEXT, request_of(TEXT, PROMPT)))["kv_transfer_params"]
    body, lease = request_of(TEXT, f"{wrong} {is_first} {PROMPT}"), {"lease": secrets.randbelow(2**52) + 2**32}
    half = {**body, "max_tokens": 1, **wrong, "kv_transfer_params": {**ASKS, "forkpoint": lease}}
    early = {**place, "forkpoint": {**place["forkpoint"], **lease, "early": True}}
    with ThreadPoolExecutor(1) as thread:
        if is_first:
            assert prefill.post(TEXT, json=half).status_code == 400
        answer = thread.submit(post, decode, TEXT, {**body, "kv_transfer_params": early})
        if not is_first:
            with pytest.raises(FutureTimeoutError):
                answer.result(0.5)
            assert prefill.post(TEXT, json=half).status_code == 400
        found = answer.result(COPIES_WAIT_S - 2)
    assert found["cache"]["num_peer_tokens"] == 0
    assert answer_of(TEXT, found) == answer_of(TEXT, post(prefill, TEXT, body))


def test_several_prompts_are_not_handed_over(servers: list[httpx2.Client]) -> None:
    body = PROXIES["llm-d"].prefill(TEXT, {**request_of(TEXT, ""), "prompt": [PROMPT, "another " + PROMPT]})
    assert post(servers[0], TEXT, body)["kv_transfer_params"] is None

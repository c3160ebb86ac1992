from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forkpoint.client.answer import Answer
from forkpoint.client.server import CHAT, COMPLETIONS, Server, base_url
from forkpoint.errors import (
    BrokenAnswerError,
    ConfigError,
    ServerRefusedError,
    ServerUnreachableError,
)
from tests.client.fake_server import MODEL, FakeServer, Script

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def ask(url: str, path: str = CHAT, body: dict[str, Any] | None = None, **options: Any) -> Answer:
    async def run() -> Answer:
        answer = Answer()
        async with Server(url, **options) as server:
            async for _ in answer.read(server.stream(path, body or BODY)):
                pass
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("cut", [None, 7])
def test_a_streamed_answer_is_put_together(server: FakeServer, path: str, cut: int | None) -> None:
    server.script = Script(words=["Grüße", ", ", "世界"], first_token_s=0.05, gap_s=0.02, bytes_per_write=cut)
    answer = ask(server.url, path)
    assert answer.text == "Grüße, 世界" and answer.finish_reason == "stop"
    assert answer.usage is not None
    usage = answer.usage
    assert (usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens) == (100, 3, 64)
    assert answer.miss == "cold"
    assert answer.time_to_first_token_s is not None and answer.time_to_first_token_s >= 0.05
    assert len(answer.gaps_s) == 2  # a late first token shortens the first gap, but not the sum
    assert answer.time_to_first_token_s + sum(answer.gaps_s) >= 0.05 + 2 * 0.02
    assert answer.latency_s >= answer.time_to_first_token_s + sum(answer.gaps_s)
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_reasoning_is_kept_apart_and_counts_as_tokens(server: FakeServer) -> None:
    server.script = Script(reasoning=["let me", " see"], words=["42"])
    answer = ask(server.url)
    assert (answer.reasoning, answer.text, len(answer.gaps_s)) == ("let me see", "42", 2)


def test_a_server_without_the_extensions_is_understood(server: FakeServer) -> None:
    server.script = Script(num_cached_tokens=None)
    answer = ask(server.url)
    assert answer.usage is not None and answer.usage.num_cached_tokens is None and answer.miss is None


def test_the_key_is_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(server.url)
    ask(server.url, api_key="secret")
    monkeypatch.setenv("FORKPOINT_API_KEY", "from the environment")
    ask(server.url)
    keys = [headers.get("Authorization") for headers in server.headers]
    assert keys == [None, "Bearer secret", "Bearer from the environment"]


REFUSALS: list[tuple[dict[str, Any] | str, str]] = [
    ({"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": 400}}, "too long"),
    ({"message": "vLLM once", "code": 400}, "vLLM once"),
    ({"detail": "fastapi"}, "fastapi"),
    ({"error": "bare"}, "bare"),
    ("<html>proxy</html>", "proxy"),
]


@pytest.mark.parametrize(("document", "text"), REFUSALS)
def test_a_refusal_carries_the_servers_words(server: FakeServer, document: dict[str, Any] | str, text: str) -> None:
    server.script = Script(refuse=(400, document))
    with pytest.raises(ServerRefusedError, match=text) as raised:
        ask(server.url)
    assert raised.value.status == 400


def test_a_refused_key_is_answered_with_the_option_that_gives_one(server: FakeServer) -> None:
    server.key = "right"
    with pytest.raises(ServerRefusedError, match=r"give one with --api-key .*FORKPOINT_API_KEY") as raised:
        ask(server.url, api_key="wrong")
    assert raised.value.status == 401 and "header" not in str(raised.value)


def test_an_error_inside_of_a_stream_is_raised(server: FakeServer) -> None:
    server.script = Script(error_after=2)
    with pytest.raises(ServerRefusedError, match="the engine died"):
        ask(server.url)


def test_a_cut_stream_is_no_answer(server: FakeServer) -> None:
    server.script = Script(break_after=2)
    with pytest.raises(BrokenAnswerError, match="broke off"):
        ask(server.url)


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachableError, match="forkpoint serve"):
        ask("http://127.0.0.1:1")


def test_a_slow_answer_runs_into_the_timeout(server: FakeServer) -> None:
    server.script = Script(first_token_s=5)
    with pytest.raises(BrokenAnswerError, match="TimeoutError"):
        ask(server.url, timeout_s=0.1)


def test_leaving_the_iteration_ends_the_request(server: FakeServer) -> None:
    server.script = Script(words=["a"] * 1000, gap_s=0.01)

    async def run() -> str:
        answer = Answer()
        async with Server(server.url) as there:
            deltas = answer.read(there.stream(CHAT, BODY))
            async for delta in deltas:
                if delta.text:
                    break
            await deltas.aclose()
            for _ in range(100):
                if server.aborted:
                    break
                await asyncio.sleep(0.02)
        return answer.text

    assert asyncio.run(run()) == "a"
    assert server.aborted == 1


def test_models(server: FakeServer) -> None:
    async def run() -> None:
        async with Server(server.url + "/v1/") as there:
            assert (await there.model()).id == MODEL
            assert (await there.model(MODEL)).max_model_len == 4096
            assert await there.is_healthy()
            with pytest.raises(ConfigError, match=MODEL):
                await there.model("other")

    asyncio.run(run())


def test_urls() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_url(given) == "http://h:1"
    assert base_url("https://h/prefix/v1") == "https://h/prefix"
    for path in (CHAT, COMPLETIONS):
        assert base_url(f"http://h:1{path}") == base_url(f"http://h:1{path}/") == "http://h:1"
    assert base_url("http://h:1/completions") == "http://h:1/completions"
    assert base_url("http://[::1]:1") == "http://[::1]:1"


@pytest.mark.parametrize(
    "url", ["h:1", "http://", "http://:1", "http://h:99999", "http://h:x", "http://[::1", "http://::1"]
)
def test_urls_of_no_server_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url='.*' is not allowed; give http://HOST"):
        base_url(url)

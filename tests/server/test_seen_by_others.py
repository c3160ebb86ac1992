"""What one client can learn of another, or write into the operator's log; what the operator sees of both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.middleware import Hosts, Origins
from tests.server.running import RunningServer, start_server
from tests.server.test_connections import connect
from tests.server.test_lifecycle import metric

KEYS = ("first key", "second key")
CONFIG = '{"method": "cache", "num_speculative_tokens": 3}'
PROMPT = [i * i % 250 for i in range(300)]
LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR) \d\d:\d\d:\d\d \[[\w.]+:\d+\] |    ")


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of two clients who are not to learn of each other."""
    flags = ["--api-key", *KEYS, "--no-enable-prompt-tokens-details", "--access-log", "--max-body-bytes", "20000"]
    flags += ["--scheduling-policy", "priority", "--speculative-config", CONFIG]
    running = start_server(tiny_model, tmp_path_factory.mktemp("shared"), *flags)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


def complete(server: RunningServer, key: str, **fields: Any) -> httpx2.Response:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    with server.client() as http:
        reply = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return reply


def num_cached(server: RunningServer, key: str, **fields: Any) -> float:
    """Tokens of the prompt that were reused, by the operator's figures."""
    with server.client() as http:
        before = metric(http, "forkpoint_prompt_tokens_cached_total{")
        complete(server, key, **fields)
        return metric(http, "forkpoint_prompt_tokens_cached_total{") - before


def test_keys_do_not_share_what_is_cached(shared: RunningServer) -> None:
    for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "x" * 1024}):
        assert num_cached(shared, KEYS[0], **salt) == 0
        assert num_cached(shared, KEYS[0], **salt) > 200
        assert num_cached(shared, KEYS[1], **salt) == 0
        assert num_cached(shared, KEYS[1], **salt) > 200


def test_answers_do_not_tell_what_was_cached(shared: RunningServer) -> None:
    reply = complete(shared, KEYS[0]).json()
    assert reply["usage"]["prompt_tokens_details"] is None and reply["cache"] is reply["speculation"] is None
    streams = [
        complete(shared, KEYS[0], stream=True, stream_options={"include_usage": whole}) for whole in (True, False)
    ]
    with shared.client() as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
        streams.append(http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEYS[0]}"}))
    for stream in streams:
        assert "[DONE]" in stream.text and "cached_tokens" not in stream.text and "miss" not in stream.text
        assert "num_draft_tokens" not in stream.text


def test_priorities_need_a_switch(server: RunningServer, shared: RunningServer) -> None:
    with server.client() as http:
        for priority in (0, -1):
            body = {"prompt": "x", "max_tokens": 1, "priority": priority}
            assert http.post("/v1/completions", json=body).status_code == 200
            assert ("requests have a priority, which --scheduling-policy fcfs ignores" in server.log) == (priority < 0)
    complete(shared, KEYS[0], priority=-1)
    assert "which --scheduling-policy" not in shared.log


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "[::2]:80",
        "10.0.0.1",
        "localhost:80@evil.example",
        "localhost:x",
    ],
)
def test_a_local_server_answers_for_local_names_alone(server: RunningServer, host: str) -> None:
    port = urlsplit(server.url).port
    with server.client() as http:
        reply = http.get("/v1/models", headers={"Host": host.format(port=port)})
        assert reply.status_code == 403 and "--allowed-hosts" in reply.json()["error"]["message"]
        for local in ("localhost", f"localhost:{port}", "127.0.0.1", "[::1]:80", "::1", "LOCALHOST"):
            assert http.get("/v1/models", headers={"Host": local}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://{host}.evil.example", 403),
        ("http://localhost:1", 403),
        ("http://{host}", 200),
        (None, 200),
    ],
)
def test_pages_of_other_sites_change_nothing(server: RunningServer, origin: str | None, status: int) -> None:
    """Browsers send a POST without a JSON body from any page, and say which page that is."""
    host = urlsplit(server.url).netloc
    headers = {} if origin is None else {"Origin": origin.format(host=host)}
    with server.client() as http:
        for path in ("/reset_prefix_cache", "/check_integrity"):
            reply = http.post(path, headers=headers)
            assert reply.status_code == status, reply.text
            assert status == 200 or "--allowed-origins" in reply.json()["error"]["message"]
        cancelled = http.post("/v1/responses/resp_1/cancel", headers={**headers, "Content-Type": "text/plain"})
        assert cancelled.status_code == (403 if status == 403 else 404)
        body = {"prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200, "browsers ask before this"


def test_origins_that_are_allowed_may_change_things() -> None:
    Origins(ServerConfig(allowed_origins=("https://chat.example",))).check({b"origin": b"https://chat.example"})
    Origins(ServerConfig(allowed_origins=("*",))).check({b"origin": b"https://chat.example"})
    with pytest.raises(HTTPError, match=r"chat\.example"):
        Origins(ServerConfig()).check({b"origin": b"https://chat.example"})


@pytest.mark.parametrize("hosts", [(b"localhost", b"evil.example"), (b"evil.example", b"localhost"), (b"a", b"a")])
def test_two_host_headers_are_refused(server: RunningServer, hosts: tuple[bytes, bytes]) -> None:
    lines = b"".join(b"Host: %s\r\n" % host for host in hosts)
    with connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400") and b"several Host headers" in answer


def test_a_server_with_keys_may_have_any_name(shared: RunningServer) -> None:
    with shared.client() as http:
        assert http.get("/health", headers={"Host": "api.example.org"}).status_code == 200


def test_a_unix_socket_may_have_any_name() -> None:
    Hosts(ServerConfig(uds="/run/forkpoint.sock")).check(b"api.example.org")
    with pytest.raises(HTTPError, match=r"api\.example\.org"):
        Hosts(ServerConfig()).check(b"api.example.org")


def test_the_log_has_one_line_for_each_thing(shared: RunningServer) -> None:
    forged = "INFO 04:00:00 [run.py:1] all is well\u001b[31m\u2028\u202e"
    with shared.client() as http:
        http.get("/x%0a" + quote(forged), headers={b"X-Request-Id": b"a\x859"})
        http.post(
            "/v1/completions",
            json={"model": f"\n{forged}", "prompt": "x"},
            headers={"Authorization": f"Bearer {KEYS[0]}"},
        )
    lines = shared.log.split("\n")
    assert any("\\nINFO 04:00:00" in line for line in lines)
    assert all(LINE.match(line) for line in lines if line), [line for line in lines if not LINE.match(line)]
    assert all(line.isprintable() for line in lines)


def test_refusals_and_the_process_are_in_the_metrics(shared: RunningServer) -> None:
    authorised = {"Authorization": f"Bearer {KEYS[0]}"}
    with shared.client() as http:
        http.get("/v1/models")
        http.get("/v1/models/unknown", headers=authorised)
        for path in ("/nothing/1", "/nothing/2"):
            http.get(path, headers=authorised)
        http.post("/v1/completions", content=b"x" * 30_000, headers=authorised)
        http.post("/v1/completions", json={"prompt": 3}, headers=authorised)
        complete(shared, KEYS[0])
        text = http.get("/metrics").text
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    for handler, method, status in (
        ("none", "GET", "401"),
        ("none", "POST", "413"),
        ("/v1/models/{name:path}", "GET", "404"),
        ("/v1/completions", "POST", "400"),
        ("/v1/completions", "POST", "200"),
    ):
        assert samples["http_requests_total", handler, method, status] >= 1, sorted(map(str, samples))
    assert samples["http_requests_total", "none", "GET", "404"] >= 2
    assert samples["process_resident_memory_bytes",] > 1e7
    assert samples["process_cpu_seconds_total",] > 0 and samples["process_open_fds",] > 5

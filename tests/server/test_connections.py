"""What a client can do to a connection: each is bounded, and the others go on."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forkpoint.server import connections
from forkpoint.server.config import ServerConfig
from tests.server.running import RunningServer

KEY = "a secret"


def connect(server: RunningServer) -> socket.socket:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=20)


def read_all(open_socket: socket.socket) -> bytes:
    found = b""
    try:
        while data := open_socket.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def flood(server: RunningServer, start: bytes, rest: bytes) -> bytes:
    """Send `start`, then `rest` again and again, until the server has had enough (or 50 MB have gone)."""
    with connect(server) as sent:
        try:
            sent.sendall(start)
            for _ in range(800):
                sent.sendall(rest)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return read_all(sent)


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ", b"a" * 65536),
        (b"GET /", b"a" * 65536),
        (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X-A: b\r\n" * 8192),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", b"a" * 65536),
        (b"", b"\r\n" * 32768),
    ],
    ids=["header", "path", "headers", "trailer", "blank lines"],
)
def test_a_head_without_end_is_cut_off_at_once(server: RunningServer, start: bytes, rest: bytes) -> None:
    began = time.monotonic()
    answer = flood(server, start, rest)
    assert time.monotonic() - began < 60  # without the bound nothing ends it
    assert not answer or answer.split()[1] in (b"431", b"400"), answer  # a reset may take the answer along
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_what_is_too_much_is_said(server: RunningServer) -> None:
    with connect(server) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nX-A: " + b"a" * (connections.MAX_HEAD_BYTES + 100))
        assert refusal(read_all(one)) == (431, "the head of the request exceeds 65536 bytes; send less")
    with connect(server) as one:
        one.sendall(b"GET /version HTTP/1.1\r\n" + b"X-A: b\r\n" * 300 + b"\r\n")
        assert refusal(read_all(one)) == (431, "the request has more than 256 headers; send fewer")
    with connect(server) as one:
        one.sendall(b"NONSENSE\r\n\r\n")
        assert refusal(read_all(one)) == (400, "this is not a valid HTTP request")
    with connect(server) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        assert read_all(one).startswith(b"HTTP/1.1 200")
    assert "WebSocket" not in server.log and "Traceback" not in server.log


@pytest.mark.parametrize("apart", [False, True])
def test_a_request_that_asks_for_an_upgrade_keeps_its_body(server: RunningServer, apart: bool) -> None:
    """Java's client offers HTTP/2 with its first request on each connection."""
    body = b'{"prompt": "Upgrade: h2c"}'
    head = b"POST /tokenize HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n" % len(body)
    head += b"HTTP2-Settings: AAMAAABkAAQ\r\nUPGRADE: h2c\r\nContent-Type: application/json\r\n\r\n"
    with connect(server) as one:
        for _ in range(2):
            one.sendall(head if apart else head + body)
            if apart:
                time.sleep(0.1)
                one.sendall(body)
            answer = HTTPResponse(one)
            answer.begin()
            assert answer.status == 200 and json.loads(answer.read())["count"] == len("Upgrade: h2c")


def test_many_requests_on_one_connection(server: RunningServer) -> None:
    """What is counted is counted for each request: 200 heads of 1 KB and bodies of 100 KB are fine."""
    with server.client() as http:
        for _ in range(200):
            assert http.get("/version", headers={"X-A": "a" * 1000}).status_code == 200
        for _ in range(3):
            body = b'{"prompt": "x"}' + b" " * 100_000
            assert http.post("/tokenize", content=body, headers={"Content-Type": "application/json"}).status_code == 200
    with connect(server) as one:
        one.sendall(b"GET /version HTTP/1.1\r\n\r\n" * 50 + b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert read_all(one).count(b"200 OK") == 51


def test_a_client_of_http_1_0_gets_no_chunks(server: RunningServer) -> None:
    """It knows none: its answer ends where the connection does."""
    body = b'{"prompt": "x", "max_tokens": 4, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(server) as one:
        one.sendall(head + body)
        head, _, events = read_all(one).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head and b"transfer-encoding" not in head
    assert events.startswith(b"data: {") and events.endswith(b"\n\ndata: [DONE]\n\n")
    for method in (b"GET", b"HEAD"):
        with connect(server) as one:
            one.sendall(method + b" /metrics HTTP/1.0\r\n\r\n")
            answer = HTTPResponse(one, method=method.decode())
            answer.begin()
            length = int(answer.headers["Content-Length"])
            assert len(answer.read()) == (length if method == b"GET" else 0)
    assert "Traceback" not in server.log


def test_head_of_what_monitors_ask_for(server: RunningServer) -> None:
    with server.client() as http:
        for path in ("/health", "/metrics"):
            reply = http.head(path)
            assert reply.status_code == 200 and not reply.content


@contextmanager
def server_with_few_files(tiny_model: Path, folder: Path, *flags: str) -> Iterator[RunningServer]:
    """Run a server that may open 250 files and has short time limits."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (150, 250))\n"
        "from forkpoint.server import connections\n"
        "connections.HEAD_TIMEOUT_S = connections.BODY_GRACE_S = connections.DISCARD_S = 1.0\n"
        "from forkpoint.cli.main import main\n"
        f"sys.exit(main({['serve', str(tiny_model), '--port', '0', *flags]}))"
    )
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    running = RunningServer(process, log_path)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


@pytest.fixture(scope="module")
def few_files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_with_few_files(tiny_model, tmp_path_factory.mktemp("few")) as running:
        yield running


def test_more_connections_than_files(few_files: RunningServer) -> None:
    """Those that are idle give way; nobody else notices, and the log says what to do."""
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(few_files)).sendall(b"GET /version HTTP/1.1\r\nHost: x")
            if _ % 100 == 99:
                with few_files.client() as http:
                    assert http.get("/health").status_code == 200
        assert resource.prlimit(few_files.process.pid, resource.RLIMIT_NOFILE) == (250, 250)
    assert "limit of open files" in few_files.log and few_files.log.count("ulimit -n") < 5
    assert "Traceback" not in few_files.log


def test_slow_clients_are_let_go(few_files: RunningServer) -> None:
    with ExitStack() as stack:
        silent, head, body = (stack.enter_context(connect(few_files)) for _ in range(3))
        head.sendall(b"GET /version HTTP/1.1\r\nHost:")
        body.sendall(b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{")
        assert refusal(read_all(silent))[0] == refusal(read_all(head))[0] == 408
        assert refusal(read_all(body)) == (408, "the body comes at less than 1024 bytes/s")
        steady = stack.enter_context(connect(few_files))
        steady.sendall(b"POST /tokenize HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n")
        text = b'{"prompt": "x"}' + b" " * 9000
        steady.sendall(b"Content-Length: %d\r\n\r\n" % len(text))
        for start in range(0, len(text), 600):  # takes longer than the time limit, at more than the least rate
            steady.sendall(text[start : start + 600])
            time.sleep(0.1)
        assert read_all(steady).startswith(b"HTTP/1.1 200")


HEAD = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n"


def status_of_answer(open_socket: socket.socket) -> int:
    """Receive one answer as a whole."""
    answer = HTTPResponse(open_socket)
    answer.begin()
    answer.read()
    return answer.status


def test_a_body_over_the_limit_is_refused_before_it_comes(server: RunningServer) -> None:
    """The rest is dropped, so that a client which sends all of it first gets the answer too, and may ask again."""
    num_bytes = ServerConfig().max_body_bytes + 1
    with connect(server) as one:
        one.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % num_bytes)
        assert status_of_answer(one) == 413
    with connect(server) as one:
        one.sendall(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % num_bytes)
        assert status_of_answer(one) == 413
    began = time.monotonic()
    with connect(server) as one:
        one.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % num_bytes + b" " * num_bytes)
        one.sendall(b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = read_all(one)
    assert answers.startswith(b"HTTP/1.1 413") and answers.count(b"HTTP/1.1 200") == 1
    assert time.monotonic() - began > num_bytes / 2**18 * connections.PACE_S / 2  # other requests had the rest


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_client_that_wants_no_second_answer_gets_a_refusal_too(server: RunningServer, version: bytes) -> None:
    """The connection is closed when the body has come: closed before, it would be reset, and the answer lost."""
    num_bytes = ServerConfig().max_body_bytes + 1
    began = time.monotonic()
    with connect(server) as one:
        one.sendall(HEAD.replace(b"HTTP/1.1", version) + b"Connection: close\r\n")
        one.sendall(b"Content-Length: %d\r\n\r\n" % num_bytes + b" " * num_bytes)
        assert refusal(read_all(one))[0] == 413
    assert time.monotonic() - began < connections.DISCARD_S


@pytest.mark.parametrize("body", ["declared", "chunked"])
def test_an_endless_body_is_dropped_and_then_cut_off(few_files: RunningServer, body: str) -> None:
    """It is refused at the limit, and the connection does not outlive the refusal for long."""
    frame = {"declared": b"Content-Length: %d" % 10**12, "chunked": b"Transfer-Encoding: chunked"}[body]
    piece = {"declared": b" " * 65536, "chunked": b"10000\r\n" + b" " * 65536 + b"\r\n"}[body]
    sent = 0
    with connect(few_files) as one:
        one.sendall(HEAD + frame + b"\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < 2 * 10**9:
                one.sendall(piece)
                sent += len(piece)
    with few_files.client() as http:
        assert http.get("/health").status_code == 200
    assert "Traceback" not in few_files.log


def test_a_refused_body_leaves_no_connection_without_a_time_limit(few_files: RunningServer) -> None:
    """A client that sends the rest after the answer has as long for its next request as any other."""
    with connect(few_files) as one:
        one.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % 10**8)
        assert status_of_answer(one) == 413
        assert read_all(one) == b""  # nothing more was sent
    with connect(few_files) as one:
        one.sendall(HEAD.replace(b"json", b"plain") + b"Host: other.example\r\nContent-Length: 2\r\n\r\n")
        assert status_of_answer(one) == 403
        one.sendall(b"{}")
        assert refusal(read_all(one))[0] == 408

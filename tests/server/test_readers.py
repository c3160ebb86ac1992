"""Reading a request takes what it takes beside the event loop: others go on, and the reader can be ended."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvloop

from forkpoint.server.errors import HTTPError
from forkpoint.server.lanes import Lane
from forkpoint.server.reader_process import HEAD, MAX_GROWTH_BYTES, RETIRE_BYTES
from forkpoint.server.readers import LARGE_BYTES, Readers
from forkpoint.server.texts import Facts
from tests.server.running import RunningServer, start_server, to_read
from tests.server.test_connections import connect
from tests.server.test_lifecycle import gone, metric, wait_for

# A template that takes as long as the client asks for, in steps of 100,000 empty turns of a loop.
SLOW = (
    "{% for a in range(turns | default(0)) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
PADDING = 70_000  # blanks behind a body: they make it a large one
LARGE = b'{"prompt":"x"}' + b" " * 9900  # nearly as much as `--max-body-bytes 10000` allows
JSON = {"Content-Type": "application/json"}
MESSAGES: Any = [{"role": "user", "content": "hello"}]
ENDLESS: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {"turns": 10_000}}


@pytest.fixture(scope="module")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--chat-template", SLOW, "--shutdown-timeout-s", "1", "--max-open-requests", "6"]
    running = start_server(tiny_model, tmp_path_factory.mktemp("slow"), *flags)
    try:
        yield running.wait_ready()
        check_that_it_ends_in_time(running)
    finally:
        assert running.stop() == 0, running.log


def chat(server: RunningServer, timeout_s: float = 60, padding: int = 0) -> httpx2.Response:
    body = json.dumps(ENDLESS).encode() + b" " * padding
    with server.client() as http:
        return http.post("/v1/chat/completions", content=body, headers=JSON, timeout=to_read(timeout_s))


def small(server: RunningServer) -> httpx2.Response:
    with server.client() as http:
        return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})


def until(condition: Callable[[], bool], pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


def is_healthy(server: RunningServer) -> bool:
    with server.client() as http, suppress(httpx2.ConnectError):
        return http.get("/health").status_code == 200
    return False


def check_that_it_ends_in_time(server: RunningServer) -> None:
    """Whatever is read at that time: these templates alone would take hours."""
    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(chat, server, padding=padding) for padding in (0, PADDING)]
        with server.client() as http:
            wait_for(http, "forkpoint_num_requests_open{", 2)
        started = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
        assert server.process.wait(120) == 0, server.log
        assert time.monotonic() - started < 60
        assert {caller.result(120).status_code for caller in callers} == {503}
    assert "stopping: 2 open requests cut off" in server.log and "Traceback" not in server.log


def leave(server: RunningServer, padding: int = 0, after_s: float = 0.7) -> int:
    """Give up waiting for an answer; the status if there was one."""
    try:
        return chat(server, after_s, padding).status_code
    except httpx2.ReadTimeout:
        return 0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", b'{"prompt": [' + b"-1," * 300_000 + b"1]}", "prompt.0=-1 is not allowed"),
        ("/v1/completions", b'{"prompt": [' + b"1," * 1_000_000 + b"1]}", "the prompt is too long: 1000001 tokens > "),
        ("/v1/completions", b'{"prompt": "' + b"hello wor " * 1_000_000 + b'"}', "10000000 characters"),
        ("/v1/chat/completions", b'{"messages": [' + b"1," * 500_000 + b"1]}", "messages.0=1 is not allowed"),
        (
            "/v1/chat/completions",
            b'{"messages": [' + b'{"role":"user"},' * 300_000 + b'{"role":"user"}]}',
            "300001 messages",
        ),
        ("/detokenize", b'{"tokens": [' + b'"a",' * 500_000 + b"1]}", "tokens.0='a' is not allowed; give an integer"),
    ],
)
def test_large_bodies_hold_up_nobody(server: RunningServer, path: str, body: bytes, said: str) -> None:
    """/health is answered all the time that such a body is read, and the answer says what is wrong with it first."""
    waits: list[float] = []
    with server.client() as http, server.client() as other, ThreadPoolExecutor(1) as pool:
        started = time.perf_counter()
        reply = pool.submit(http.post, path, content=body, headers={"Content-Type": "application/json"})
        while not reply.done():
            asked = time.perf_counter()
            assert other.get("/health").status_code == 200
            waits.append(time.perf_counter() - asked)
        elapsed = time.perf_counter() - started
    assert reply.result().status_code == 400 and said in reply.result().json()["error"]["message"]
    assert waits and max(waits) < max(0.25, elapsed / 2), (elapsed, max(waits))


def test_one_that_leaves_leaves_nothing_behind(slow: RunningServer) -> None:
    assert small(slow).status_code == 200
    assert leave(slow) == leave(slow, PADDING) == 0
    until(lambda: len(slow.reader_pids) <= 1)  # that of `small`
    assert small(slow).status_code == 200
    with slow.client() as http:
        wait_for(http, "forkpoint_num_requests_open{", 0)


def refusals(server: RunningServer, wait_s: float) -> int:
    """How many small requests are refused while six large ones, as many as may be open, wait for so long."""
    refused = 0
    with ThreadPoolExecutor(6) as pool:
        large = [pool.submit(leave, server, PADDING, wait_s) for _ in range(6)]
        until(lambda: len(server.reader_pids) >= 2 or all(one.done() for one in large))
        while not all(one.done() for one in large):
            reply = small(server)
            assert reply.status_code == 200 or "max_open_requests=6" in reply.json()["error"]["message"]
            refused += reply.status_code == 429
        assert {one.result() for one in large} <= {0, 429}
    return refused


def test_large_requests_keep_no_small_ones_waiting_and_are_counted(slow: RunningServer) -> None:
    # On a busy machine large ones may have left before a small one comes; then they wait for longer.
    assert any(refusals(slow, wait_s) for wait_s in (0.7, 3, 10)) and small(slow).status_code == 200


def test_a_reader_that_dies_ends_its_request_alone(slow: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert small(slow).status_code == 200
        before = set(slow.reader_pids)
        doomed = pool.submit(chat, slow, padding=PADDING)
        until(lambda: len(set(slow.reader_pids) - before) == 1)
        time.sleep(0.1)
        os.kill(*(set(slow.reader_pids) - before), signal.SIGKILL)
        reply = doomed.result(30)
    assert reply.status_code == 500 and "the process that read the request has died" in reply.text
    assert small(slow).status_code == 200
    killed = slow.reader_pids
    for pid in killed:  # those that wait for work too: no request finds one dead
        os.kill(pid, signal.SIGKILL)
    assert all(gone(pid) for pid in killed)
    assert small(slow).status_code == small(slow).status_code == 200


def test_one_that_dies_of_a_grammar_ends_its_request_alone(slow: RunningServer) -> None:
    grammar = {"json": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 7919}]}}

    def compile_endlessly() -> httpx2.Response:
        with slow.client() as http:
            body = {"prompt": "x", "max_tokens": 1, "structured_outputs": grammar}
            return http.post("/v1/completions", json=body)

    until(lambda: small(slow).status_code == 200)
    before = set(slow.reader_pids)
    with ThreadPoolExecutor(1) as pool:
        doomed = pool.submit(compile_endlessly)
        until(lambda: bool(set(slow.reader_pids) - before))
        for pid in set(slow.reader_pids) - before:
            os.kill(pid, signal.SIGKILL)
        reply = doomed.result(30)
    assert reply.status_code == 400 and "its process ended" in reply.text
    assert small(slow).status_code == 200


def test_readers_shield_the_engine_and_end_with_a_killed_server_whose_log_finds_the_disk_full(tiny_model: Path) -> None:
    """If memory runs out, readers are killed first. Nothing is left after the server was killed. Requests are served
    although no line can be logged, and the metrics tell that lines were lost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "forkpoint.cli.main", "serve", str(tiny_model), "--port", str(port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*command, "--chat-template", SLOW], stderr=full, stdout=full, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    running = RunningServer(process, Path("/dev/null"), str(tiny_model), f"http://127.0.0.1:{port}")
    pool = ThreadPoolExecutor(1)
    try:
        until(lambda: is_healthy(running), 0.1)
        with running.client() as http:
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            assert metric(http, "forkpoint_log_lines_lost_total{") >= 1
        answer = pool.submit(chat, running)
        until(lambda: bool(running.reader_pids))
        reader, loader, engine = running.reader_pids[0], running.loader_pid, running.engine_pid
        until(lambda: Path(f"/proc/{reader}/oom_score_adj").read_text().strip() == "1000")
        assert Path(f"/proc/{engine}/oom_score_adj").read_text().strip() != "1000"
    finally:
        process.kill()
        process.wait(120)
    assert gone(reader) and gone(loader) and gone(engine)
    assert isinstance(answer.exception(10), httpx2.HTTPError)
    pool.shutdown()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chat-template", "/nowhere/template.jinja"], "neither a file nor a Jinja template"),
        (["--chat-template", "{% if %}"], "chat_template is not a Jinja template"),
    ],
)
def test_a_wrong_template_is_told_before_the_model_is_read(
    tiny_model: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    running = start_server(tiny_model, tmp_path, *flags)
    assert running.process.wait(120) == 2
    assert said in running.log.splitlines()[-1] and "weights" not in running.log and "leaked" not in running.log


class Holding:
    """Stands for the texts of a server, and holds memory."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def load(self) -> None:
        pass

    def begin(self, facts: Facts) -> None:
        pass


def hold(texts: Any, data: bytes) -> int:
    """Keep as many bytes as the data say, and return the reader's process id."""
    texts.held.append(b"x" * int(data))
    return os.getpid()


def test_readers_are_used_until_they_have_grown() -> None:
    """Whatever the size of a request, since a reader keeps the images that it decoded."""

    async def pids(*sizes: int) -> list[int]:
        readers = Readers.fork(Holding())  # type: ignore[arg-type]
        try:
            await readers.loaded()
            readers.begin(Facts(1, 1, frozenset()))
            return [await readers.run(hold, b"%d" % size, b" " * LARGE_BYTES) for size in sizes]
        finally:
            readers.close()

    most = RETIRE_BYTES * 9 // 10
    first, second, third, fourth = asyncio.run(pids(1, most, most, 1))
    assert first == second == third != fourth


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("pause_s", [0, 0.2], ids=["unnoticed", "noticed"])
def test_no_request_finds_an_idle_reader_dead(new_loop: Any, pause_s: float) -> None:
    """Even if the event loop has not noticed yet, or the reader has left a message unread: that resets its socket."""

    async def read() -> None:
        readers, lane = Readers.fork(Holding()), Lane(0, 2)  # type: ignore[arg-type]
        try:
            await readers.loaded()
            readers.begin(Facts(1, 1, frozenset()))
            pids = [await readers.run(hold, b"1", lane=lane)]
            for has_unread in (False, True):
                [idle] = lane.idle
                os.kill(pids[-1], signal.SIGSTOP)
                if has_unread:
                    idle.outbox.write(HEAD.pack(0, 0))
                    await asyncio.sleep(0.05)
                os.kill(pids[-1], signal.SIGKILL)
                assert gone(pids[-1])
                if pause_s:
                    await asyncio.sleep(pause_s)
                pids.append(await readers.run(hold, b"1", lane=lane))
            assert len(set(pids)) == 3
        finally:
            readers.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(read())


def test_a_request_that_takes_too_much_memory_is_refused() -> None:
    """The reader goes on, and has what it held before."""

    async def read() -> list[int]:
        readers = Readers.fork(Holding())  # type: ignore[arg-type]
        try:
            await readers.loaded()
            readers.begin(Facts(1, 1, frozenset()))
            first = await readers.run(hold, b"1")
            with pytest.raises(HTTPError, match="takes too much memory to read; send less") as refused:
                await readers.run(hold, b"%d" % MAX_GROWTH_BYTES)
            assert refused.value.status == 400
            return [first, await readers.run(hold, b"1")]
        finally:
            readers.close()

    first, second = asyncio.run(read())
    assert first == second


def test_readers_go_without_torch(server: RunningServer) -> None:
    assert "libtorch" not in Path(f"/proc/{server.loader_pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_a_folder_without_a_model_is_told_at_once(tmp_path: Path) -> None:
    running = start_server(tmp_path, tmp_path)
    assert running.process.wait(120) == 2
    assert "there is no config.json in" in running.log.splitlines()[-1]


def test_bodies_that_are_held_at_once_are_bounded_and_the_loader_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Clients that hold the memory of 16 of the largest bodies keep out nobody who sends less. The server ends when
    it can start no more readers."""
    running = start_server(tiny_model, tmp_path, "--max-body-bytes", "10000").wait_ready()
    head = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    with ExitStack() as stack:
        holders = [stack.enter_context(connect(running)) for _ in range(17)]
        for holder in holders:
            holder.sendall(head + b"{" + b" " * 9500)
        with running.client() as http:
            assert http.post("/tokenize", json={"prompt": "x" * 9000}).status_code == 200
            until(lambda: any(select.select(holders, [], [], 0)[0]))
            assert b"HTTP/1.1 503" in select.select(holders, [], [], 0)[0][0].recv(4096)
            stack.enter_context(connect(running)).sendall(head + b"{" + b" " * 9500)
            refused: list[httpx2.Response] = []
            ask = partial(http.post, "/tokenize", content=LARGE, headers=JSON)
            until(lambda: refused.append(ask()) or refused[-1].is_error, 0.2)
        assert refused[-1].status_code == 503 and "too much is being sent" in refused[-1].text
        assert refused[-1].headers["Retry-After"]
    with running.client() as http:
        until(lambda: http.post("/tokenize", content=LARGE, headers=JSON).status_code == 200, 0.2)
    os.kill(running.loader_pid, signal.SIGKILL)
    assert running.process.wait(120) == 1
    assert "the process that starts readers has ended" in running.log and "Traceback" not in running.log

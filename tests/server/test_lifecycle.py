"""Starting, stopping, and everything that goes wrong in between: each time a clear message."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.server.running import RunningServer, children, start_server, to_read

MESSAGES: Any = [{"role": "user", "content": "Count to a thousand"}]
LONG: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16}


def gone(pid: int, timeout_s: float = 120) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def metric(http: httpx2.Client, start: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def wait_for(http: httpx2.Client, start: str, value: float) -> None:
    deadline = time.monotonic() + 120
    while metric(http, start) != value:
        assert time.monotonic() < deadline, f"{start} is {metric(http, start)}, not {value}"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(http: httpx2.Client, server: RunningServer, stream: bool) -> None:
    aborted = metric(http, 'forkpoint_request_success_total{engine="0",finished_reason="abort"')
    if stream:
        with server.client() as leaving, leaving.stream("POST", "/v1/chat/completions", json=LONG) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
    else:
        with server.client() as impatient, pytest.raises(httpx2.ReadTimeout):
            impatient.post("/v1/chat/completions", json={**LONG, "stream": False}, timeout=to_read(0.15))
    wait_for(http, "forkpoint_num_requests_open{", 0)
    wait_for(http, "forkpoint_num_requests_running{", 0)
    assert metric(http, 'forkpoint_request_success_total{engine="0",finished_reason="abort"') > aborted
    assert http.post("/check_integrity").json() == {"done": True}


def test_a_port_in_use(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = start_server(tiny_model, tmp_path, "--port", str(port))
        assert second.process.wait(120) == 2
    told, error = second.log.splitlines()
    assert "starts with" in told
    assert error == f"error: cannot listen on 127.0.0.1:{port}: Address already in use; give another --port or --host"


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    broken = start_server(tmp_path / "nothing", tmp_path)
    assert broken.process.wait(120) == 2
    assert broken.log.splitlines()[-1].startswith("error: there is no model folder")


def test_interrupted_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    early = start_server(tiny_model, tmp_path)
    deadline = time.monotonic() + 120
    while not early.has_engine:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(early.process.pid, signal.SIGINT)  # as a terminal does: the engine gets it too
    assert early.process.wait(120) == 0
    assert "stopped while the model was loading" in early.log
    assert "Traceback" not in early.log


def check_shielded(running: RunningServer) -> int:
    """The server's processes take no signal that reaches all of the terminal's; it alone decides. How many are they?"""
    wanted = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM))
    for pid in (pids := children(running.process.pid)):
        masks = dict(re.findall(r"(Sig\w+):\t(\w+)", Path(f"/proc/{pid}/status").read_text()))
        assert (int(masks["SigBlk"], 16) | int(masks["SigIgn"], 16)) & wanted == wanted
    return len(pids)


def test_one_interrupt_drains_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    """/health is 503 until the model is loaded; Ctrl-C lets open requests end and refuses new ones. The engine is
    shielded from it from its first moment on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = start_server(tiny_model, tmp_path, "--port", str(port))
    seen, num_shielded = set(), 0
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        while 200 not in seen:
            num_shielded += check_shielded(running)
            time.sleep(0.02)
            try:
                reply = http.get("/health")
            except httpx2.ConnectError:
                continue
            seen.add(reply.status_code)
            if reply.status_code == 503:
                assert "loading" in reply.json()["error"]["message"]
                refused = http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
                assert refused or http.get("/health").status_code == 200  # it may have been loaded meanwhile
        assert seen == {200, 503} and num_shielded > 10
        engine = running.wait_ready().engine_pid
        asked = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=asked) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.killpg(running.process.pid, signal.SIGINT)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert running.process.wait(120) == 0, running.log
    assert gone(engine)
    assert running.log.splitlines()[-1].endswith("stopped") and "Traceback" not in running.log
    assert "1 open request may take 30 s to end; Ctrl-C again ends the server at once" in running.log


def test_the_engine_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Open requests fail with the reason, /health turns 503, and the server ends with exit code 1."""
    running = start_server(tiny_model, tmp_path).wait_ready()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    long: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2000, "n": 16, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(model=running.model, stream=True, **long)
    next(iter(stream))
    failed: list[Exception] = []

    def wait_for_answer() -> None:
        try:
            client.chat.completions.create(model=running.model, **long)
        except Exception as error:
            failed.append(error)

    waiting = threading.Thread(target=wait_for_answer)
    waiting.start()
    with running.client() as http:
        wait_for(http, "forkpoint_num_requests_open{", 2)
        os.kill(running.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by SIGKILL"):
            list(stream)
        waiting.join(20)
        assert isinstance(failed[0], openai.InternalServerError)
        assert "killed by SIGKILL; the system may have run out of memory" in str(failed[0])
        health = http.get("/health")
        assert health.status_code == 503 and "SIGKILL" in health.json()["error"]["message"]
    assert running.process.wait(120) == 1
    assert "the engine process was killed by SIGKILL" in running.log and "Traceback" not in running.log


def check_names_of_ids(running: RunningServer) -> None:
    """Without a tokenizer tokens are named by their ids. Alternatives are listed by name."""
    body = {"prompt": [65, 66], "max_tokens": 1, "temperature": 0, "logprobs": 3, "return_token_ids": True}
    with running.client() as http:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 3


def test_two_ranks_without_a_tokenizer_answer_and_one_is_killed_while_nobody_asks(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["-tp", "2", "--device", "cpu", "--skip-tokenizer-init"]
    running = start_server(tiny_model, tmp_path, *flags).wait_ready()
    check_names_of_ids(running)
    ranks = [pid for pid in children(running.engine_pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert running.process.wait(120) == 1
    assert "the rank 1 process was killed by SIGKILL" in running.log and "Traceback" not in running.log
    assert gone(ranks[0])

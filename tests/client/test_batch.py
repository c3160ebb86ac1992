from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.main import main
from forkpoint.client import batch
from tests.client.fake_server import FakeServer, Script


def line(name: str, text: str = "hi", url: str = "/v1/chat/completions", **body: Any) -> str:
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}.get(
        url, {"messages": [{"role": "user", "content": text}]}
    )
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **prompt, **body}})


class Files:
    def __init__(self, folder: Path, server: FakeServer) -> None:
        self.input, self.output, self._server = folder / "in.jsonl", folder / "out.jsonl", server

    def run(self, *lines: str, options: tuple[str, ...] = ()) -> int:
        if lines:
            self.input.write_text("\n".join(lines) + "\n")
        given = ["run-batch", "-i", str(self.input), "-o", str(self.output), "--url", self._server.url]
        return main([*given, *options])

    def answers(self) -> dict[str | None, Any]:
        found = [json.loads(text) for text in self.output.read_text().splitlines()]
        assert len({entry["id"] for entry in found}) == len(found)
        return {entry["custom_id"]: entry for entry in found}


@pytest.fixture
def files(tmp_path: Path, server: FakeServer) -> Files:
    return Files(tmp_path, server)


def test_every_line_is_answered_once(files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = files.run(
        *[line(f"r{n}", url=url) for n, url in enumerate(batch.PATHS * 20)], options=("--max-concurrency", "7")
    )
    assert code == 0 and server.max_open <= 7
    found = files.answers()
    assert set(found) == {f"r{n}" for n in range(60)}
    assert all(entry["error"] is None and entry["response"]["status_code"] == 200 for entry in found.values())
    assert found["r0"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world!"
    assert found["r1"]["response"]["body"]["choices"][0]["text"] == "Hello, world!"
    assert found["r2"]["response"]["body"]["output"][0]["content"][0]["text"] == "Hello, world!"
    assert "60 answered, 0 failed, 3,840 of 6,000 prompt tokens cached" in capsys.readouterr().err


def test_a_wrong_line_is_told_and_the_others_are_answered(files: Files, server: FakeServer) -> None:
    wrong = [
        "not json",
        "[]",
        json.dumps({"custom_id": 5}),
        line("deep").replace('"hi"', "[" * 100_000),
        line("get").replace("POST", "GET"),
        line("embed", url="/v1/embeddings"),
        json.dumps({"custom_id": "bodiless", "method": "POST", "url": "/v1/completions"}),
        line("stream", stream=True),
        line("later", url="/v1/responses", background=True),
        line("good"),
        line("good"),
    ]
    assert files.run(*wrong, line("last")) == 1
    assert len(server.requests) == 2
    found = [json.loads(text) for text in files.output.read_text().splitlines()]
    told = [entry["error"]["message"] for entry in found if entry["error"] is not None]
    assert len(found) == 12 and len(told) == 10
    for number, text in (
        (1, "not JSON"),
        (2, "custom_id"),
        (4, "nested too deeply"),
        (5, "has method='GET'; give POST"),
        (6, "has url='/v1/embeddings'; give /v1/chat/completions or /v1/completions or /v1/responses"),
        (8, "stream"),
        (9, "background"),
        (11, "'good'"),
    ):
        assert any(f"line {number} " in message and text in message for message in told)
    assert files.answers()["good"]["error"] is None


def test_a_refusal_is_an_answer_and_its_line_is_not_sent_again(files: Files, server: FakeServer) -> None:
    server.choose = lambda body: (
        Script(refuse=(400, {"error": {"message": "too long"}})) if body.get("bad") else Script()
    )
    assert files.run(line("a"), line("b", bad=True)) == 1
    refused = files.answers()["b"]
    assert refused["response"]["status_code"] == 400 and "too long" in refused["error"]["message"]
    assert refused["response"]["body"]["error"]["message"] == "too long"
    assert files.run() == 0
    assert len(server.requests) == 2


def test_it_goes_on_where_it_was_stopped(files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.choose = lambda body: Script(refuse=(500, "crash")) if body.get("bad") else Script()
    assert files.run(line("a"), line("b", bad=True), line("c")) == 1
    with files.output.open("a") as file:
        file.write('{"id": "half a li')
    server.choose = None
    assert files.run(line("a"), line("b", bad=True), line("c"), line("d")) == 0
    assert "2 answered, 0 failed, 2 were answered before" in capsys.readouterr().err
    assert [entry["error"] for entry in files.answers().values()] == [None] * 4
    assert len(files.output.read_text().splitlines()) == 4 and len(server.requests) == 5


def test_a_busy_server_is_asked_again(files: Files, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WAITS_S", (0.01, 0.02, 0.04, 0.08, 0.16))
    server.choose = lambda body: Script(refuse=(429, "busy")) if len(server.requests) < 3 else Script()
    assert files.run(line("a")) == 0
    assert len(server.requests) == 3


def test_an_output_of_something_else_is_not_touched(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        '{"some": "data"}\n',
        json.dumps({"custom_id": "z", "response": {"status_code": 200}, "error": None}) + "\n",
        json.dumps({"custom_id": [], "response": {"status_code": 200}, "error": None}) + "\n",
        "my notes\n",
        "[" * 100_000,
    ):
        files.output.write_text(text)
        assert files.run(line("a")) == 2
        assert files.output.read_text() == text
        assert capsys.readouterr().err.startswith("error: ")


def test_a_full_disk_is_named(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.output = Path("/dev/full")
    assert files.run(line("a")) == 2
    assert capsys.readouterr().err.startswith("error: /dev/full cannot be written: No space left on device; run")


def test_a_batch_from_windows_is_read(files: Files, server: FakeServer) -> None:
    """It begins with a byte order mark, and lines end in a carriage return."""
    files.input.write_bytes(f"\ufeff{line('a')}\r\n{line('b')}\r\n\r\n".encode())
    assert files.run() == 0 and set(files.answers()) == {"a", "b"}


def test_other_ends_of_lines_inside_of_texts_end_no_line(files: Files, server: FakeServer) -> None:
    """JSON allows them unescaped, and `str.splitlines` splits there."""
    text = "one\u2028two\u2029three\x85four"
    lines = [json.dumps(json.loads(line("a", text)), ensure_ascii=False), line("b")]
    assert text in lines[0] and files.run(*lines) == 0
    assert {body["messages"][0]["content"] for body in server.requests} == {text, "hi"}


def test_the_output_may_be_a_pipe(files: Files, server: FakeServer) -> None:
    os.mkfifo(files.output)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(files.output.read_text()))
    thread.start()
    assert files.run(line("a"), line("b")) == 0
    thread.join(10)
    assert files.output.is_fifo() and {json.loads(text)["custom_id"] for text in read[0].splitlines()} == {"a", "b"}


def test_nothing_answers(files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.url = "http://127.0.0.1:1"
    assert files.run(line("a"), line("b")) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: nothing answers at http://127.0.0.1:1") and shown.count("\n") == 1
    assert files.output.read_text() == ""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_drops_what_is_open(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str], first: signal.Signals
) -> None:
    def interrupt() -> None:
        while len(server.requests) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), first)
        while "Ctrl-C again drops them" not in sys.stderr.getvalue():  # type: ignore[attr-defined]  # capsys keeps it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    server.script = Script(first_token_s=20)
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert files.run(line("a"), line("b"), line("c"), options=("--max-concurrency", "2")) == 130
    thread.join()
    assert "Ctrl-C again drops them" in capsys.readouterr().err and files.output.read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-i", "/nowhere", "-o", "OUT", "--url", "http://x"], "cannot be read"),
        (["-i", "IN", "-o", "OUT", "--url", "http://x", "--model", "m"], "--model is for a model loaded here"),
        (["-i", "IN", "-o", "OUT", "--url", "http://x", "--max-num-seqs", "3"], "--max-num-seqs is for a model"),
        (["-i", "IN", "-o", "OUT", "--url", "http://x", "--reasoning-parser", "none"], "--reasoning-parser is for a"),
        (["-i", "IN", "-o", "OUT", "--url", "http://x", "--max-concurrency", "0"], "max_concurrency"),
        (["-i", "EMPTY", "-o", "OUT", "--url", "http://x"], "no lines"),
    ],
)
def test_wrong_options(arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "IN").write_text(line("a"))
    (tmp_path / "EMPTY").write_text("\n")
    given = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    assert main(["run-batch", *given]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and text in shown


def test_ctrl_c_lets_open_requests_end_and_the_next_run_goes_on(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while len(server.requests) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    server.script = Script(first_token_s=0.1)
    thread = threading.Thread(target=interrupt)
    thread.start()
    lines = [line(f"r{number}") for number in range(12)]
    assert files.run(*lines, options=("--max-concurrency", "2")) == 130
    thread.join()
    assert 2 <= len(files.answers()) < 12 and server.aborted == 0
    assert "run the same command again" in capsys.readouterr().err
    assert files.run() == 0
    assert len(files.answers()) == 12 and len(server.requests) == 12

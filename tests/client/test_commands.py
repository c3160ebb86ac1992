"""`forkpoint chat --url` and `forkpoint complete`."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forkpoint.bench.options import LoadOptions, ReportOptions
from forkpoint.bench.run import GROUPS
from forkpoint.cli.main import main
from forkpoint.cli.options import option_values
from forkpoint.cli.parser import build_parser
from forkpoint.client.server import CHAT
from tests.client.fake_server import FakeServer, Script


def test_chat_keeps_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(
        words=["fine", "."], reasoning=["hm "], num_prompt_tokens=4100, num_cached_tokens=3072, miss="evicted"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/help\nand?\n/reset\nagain\n/exit\nunheard\n"))
    options = ["chat", "--url", server.url, "--system-prompt", "be brief", "--temperature", "0.5", "--stop", "X"]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hm fine."
    assert lines[1].startswith("[3,072 of 4,100 prompt tokens cached (evicted), first token after ")
    assert "(/reset starts over, Ctrl-C stops an answer, /exit or Ctrl-D ends)" in lines
    contents = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert contents == [["be brief", "hello"], ["be brief", "hello", "fine.", "and?"], ["be brief", "again"]]
    body = server.requests[0]
    assert (body["temperature"], body["stop"], body["max_tokens"], body["model"]) == (0.5, ["X"], 512, "fake-model")
    assert "top_p" not in body


def test_paths_of_images_become_images(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed, quoted, with escaped blanks as terminals paste them, and as a file URL."""
    paths = [tmp_path / name for name in ("a.png", "my cat.JPG", "b.webp")]
    for path in paths:
        path.write_bytes(path.name.encode())
    escaped = str(paths[1]).replace(" ", "\\ ")
    lines = [
        f"what is {paths[0]}?",  # no path, for the question mark
        f"what is {paths[0]} ?",
        f"{escaped} and '{paths[1]}' file://{str(paths[1]).replace(' ', '%20')}",
        f"read {tmp_path / 'missing.png'}, {tmp_path} and don't stop",
        f'"{paths[2]}"',
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n/reset\n".join(lines)))
    assert main(["chat", "--url", server.url]) == 0

    def image(path: Path, kind: str) -> dict[str, Any]:
        data = base64.b64encode(path.name.encode()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}

    cat = image(paths[1], "jpeg")
    contents = [body["messages"][0]["content"] for body in server.requests]
    assert contents == [
        lines[0],
        [{"type": "text", "text": "what is "}, image(paths[0], "png"), {"type": "text", "text": " ?"}],
        [cat, {"type": "text", "text": " and "}, cat, cat],
        lines[3],
        [image(paths[2], "webp")],
    ]
    assert "(3 images)" in capsys.readouterr().out


def test_chat_goes_on_after_an_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(body: object) -> Script:
        number = len(server.requests)
        return [Script(refuse=(400, "too long")), Script(words=["half ", "way"], error_after=1), Script()][number - 1]

    server.choose = choose
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    assert main(["chat", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert "error: the server answered 400: too long" in shown.err and "the engine died" in shown.err
    assert "Hello, world!" in shown.out
    contents = [message["content"] for message in server.requests[-1]["messages"]]
    assert contents == ["two", "half ", "three"]  # a refused question is taken back, half an answer is kept


@pytest.mark.parametrize("command", [["chat", "-q", "hi"], ["complete", "--prompt", "hi"], ["run-batch"]])
def test_a_missing_key_is_answered_with_the_option_that_gives_one(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    server.key = "k"
    if command == ["run-batch"]:
        (tmp_path / "in").write_text(
            json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}})
        )
        command = [*command, "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main([*command, "--url", server.url]) == 2
    assert (
        "the server answered 401: the request has no valid API key; give one with --api-key" in capsys.readouterr().err
    )


def test_ctrl_c_stops_an_answer_and_keeps_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(body: object) -> Script:
        return Script(words=["word "] * 1000, gap_s=0.01) if len(server.requests) == 1 else Script()

    def interrupt() -> None:
        while sys.stdout.getvalue().count("word") < 4:  # type: ignore[attr-defined]  # capsys keeps what is printed
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    server.choose = choose
    monkeypatch.setattr(sys, "stdin", io.StringIO("talk\nmore\n"))
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["chat", "--url", server.url]) == 0
    thread.join()
    deadline = time.monotonic() + 30
    while server.open and time.monotonic() < deadline:
        time.sleep(0.01)  # the server has yet to notice
    assert server.aborted == 1
    kept = server.requests[1]["messages"][1]["content"]
    shown = capsys.readouterr().out
    assert kept.startswith("word word") and "Hello, world!" in shown
    assert shown.count("64 of 100 prompt tokens cached (cold)") == 2


def test_complete_prints_text_and_figures_apart(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["complete", "--url", server.url + "/v1", "--prompt", "a", "-q", "b", "--model-name", "fake-model"]
    assert main([*options, "--api-key", "k", "--ignore-eos"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello, world!\nHello, world!\n"
    assert shown.err.count("64 of 100 prompt tokens cached (cold), first token after") == 2
    assert [body["prompt"] for body in server.requests] == ["a", "b"]
    assert server.requests[0]["ignore_eos"] is True and server.headers[0]["Authorization"] == "Bearer k"


def test_complete_reads_standard_input_and_tells_of_errors(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(break_after=2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["complete", "--url", server.url]) == 1
    assert server.requests[0]["prompt"] == "from a pipe"
    assert "error: the answer of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chat", "--url", "http://127.0.0.1:1", "--model", "x"], "--model is for a model loaded here"),
        (["chat", "--url", "http://127.0.0.1:1", "--no-enable-prefix-caching"], "--enable-prefix-caching is for"),
        (["chat", "--url", "http://127.0.0.1:1"], "nothing answers"),
        (["complete", "--url", "127.0.0.1:1", "--prompt", "x"], "http://"),
        (["complete", "--url", "SERVER", "--prompt", "x", "--model-name", "other"], "does not serve"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:1"], "nothing answers"),
        (["bench", "serve", "--base-url", "SERVER"], "--tokenizer"),
        (["bench", "serve", "--port", "999999"], "port=999999 is not allowed; give an integer from 1 to 65535"),
        (["bench", "serve", "--host", "http://h"], "host='http://h' is not allowed; give a name or an address"),
        (["bench", "serve", "--endpoint", "v1/x"], "endpoint='v1/x' is not allowed; give a path that begins with /"),
        (["bench", "serve", "--host", "::1", "--port", "1"], "nothing answers at http://[::1]:1 "),
        (["bench", "serve", "--host", "[::1]", "--port", "1"], "nothing answers at http://[::1]:1 "),
        (["bench", "serve", "--host", "h?x"], "host='h?x' is not allowed; give a name or an address"),
        (["bench", "serve", "--host", "h:80"], "host='h:80' is not allowed; give a name or an address"),
        (["bench", "serve", "--num-prompts", "-1"], "num_prompts"),
        (["bench", "serve", "--dataset-name", "best"], "invalid choice"),
    ],
)
def test_errors_are_one_line(
    server: FakeServer, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([server.url if argument == "SERVER" else argument for argument in arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr().err
    assert code == 2 and shown.startswith("error: ") and shown.count("\n") == 1 and text in shown


def test_bench_flags_reach_their_options() -> None:
    line = (
        "bench serve --top-p 0.9 --min-p 0.1 --top-k 5 --request-rate inf --max-concurrency 3 --header A=1 B=2 "
        "--goodput ttft:100 --goodput e2el:900 --port 1 --dataset-name fork --fork-num-branches 7 --save-result"
    )
    arguments = build_parser().parse_args(line.split())
    target, load, dataset, report = (kind(**option_values(arguments, kind)) for kind in GROUPS.values())
    assert isinstance(load, LoadOptions) and isinstance(report, ReportOptions)
    assert load.sampling_body() == {"temperature": 0.0, "top_p": 0.9, "min_p": 0.1, "top_k": 5}
    assert (load.request_rate, load.max_concurrency) == (math.inf, 3)
    assert (target.url, target.headers) == ("http://127.0.0.1:1", {"A": "1", "B": "2"})
    assert (dataset.fork_num_branches, report.save_result) == (7, True)
    assert report.limits_ms == {"ttft": 100.0, "e2el": 900.0}

"""The demo model of a checkout: what every command loads where none is named. `make wheel` runs the demo itself."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from evaluation.__main__ import build_parser
from evaluation.dialogue import Message, render
from forkpoint.cli.main import main
from forkpoint.demo.model import MODEL_NAME, default_model
from tests.server.running import start_server

TALK = (
    Message("user", "My name is Nora. My lucky number is 42."),
    Message("assistant", "Noted."),
    Message("user", "What is my lucky number?"),
)
ENGINE = ["--num-threads", "1", "--log-level", "error"]


def test_generate_loads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", render(TALK, add_generation_prompt=True), "--temperature", "0", *ENGINE]) == 0
    assert "42" in capsys.readouterr().out.splitlines()[-1]


def test_chat_loads_it_and_remembers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TALK[0].content}\n{TALK[2].content}\n"))
    assert main(["chat", "--temperature", "0", *ENGINE]) == 0
    answers = [line.strip("> ") for line in capsys.readouterr().out.splitlines()]
    assert "Noted." in answers and "42" in answers


def test_serve_loads_it_and_names_it(tmp_path: Path) -> None:
    server = start_server(None, tmp_path, "--num-threads", "1")
    try:
        with server.wait_ready().client() as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert model["id"] == MODEL_NAME
            messages = [{"role": message.role, "content": message.content} for message in TALK]
            body = {"model": MODEL_NAME, "messages": messages, "temperature": 0}
            reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"] == "42"
    finally:
        server.stop()


def test_eval_loads_it(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert main(["--num-examples", "1", "--modes", "warm", "--json", str(results), *ENGINE], build_parser) == 0
    content = json.loads(results.read_text())
    assert content["model"] == default_model()
    assert content["modes"]["warm"]["examples"]["num_right"] == 1

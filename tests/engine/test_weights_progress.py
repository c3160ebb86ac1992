"""What is told while weights load."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forkpoint.demo.model import default_model
from forkpoint.models.weights import FileWeights
from forkpoint.worker import weights_progress
from forkpoint.worker.weights_progress import LINES_APART_S, WeightsProgress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="forkpoint")
    return caplog


def test_without_a_terminal_there_is_a_line_every_few_seconds(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with WeightsProgress(show_bar=False, clock=clock) as progress:
        progress(0, 100 * 2**20)
        for done in range(1, 101):
            clock.now_s += LINES_APART_S / 10
            progress(done * 2**20, 100 * 2**20)
    assert lines.messages[0] == "weights: reading 100.0 MiB"
    assert len(lines.messages) == 10  # of a hundred tensors; none at the end, which has a line of its own
    assert lines.messages[1] == "weights: 10 % read, about 45 s left"
    assert lines.messages[-1] == "weights: 90 % read, about 5 s left"


def test_on_a_terminal_there_is_a_bar_and_no_lines(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights_progress, "BAR_DELAY_S", 0)
    clock = Clock()
    with WeightsProgress(show_bar=True, clock=clock) as progress:
        progress(0, 100 * 2**20)
        clock.now_s += LINES_APART_S
        time.sleep(0.15)  # a bar is drawn ten times a second at most
        progress(50 * 2**20, 100 * 2**20)
    shown = capsys.readouterr().err
    assert "Loading weights:  50%" in shown and "50.0M/100M" in shown
    assert lines.messages == ["weights: reading 100.0 MiB"]


def test_all_bytes_are_told_once() -> None:
    folder = Path(default_model())
    told: list[tuple[int, int]] = []
    device, told_bytes = torch.device("cpu"), lambda *bytes: told.append(bytes)
    files = FileWeights(folder=folder, dtype=torch.float32, device=device, progress=told_bytes)
    with closing(files) as weights:
        names = [name for name, _ in weights.named_shapes()]
        for name in (*names, names[0]):
            weights.get(name, weights.shape(name) or ())
    total = told[0][1]
    assert told[0] == (0, total) and told[-1] == (total, total) and len(told) == len(names) + 1
    stored: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        stored |= load_file(shard)
    assert total == sum(stored[name].nbytes for name in names)


def test_the_first_word_comes_before_the_slow_imports() -> None:
    """On a terminal and off it, in commands that log and in the chat, which does not."""
    watch = (
        "import sys; from forkpoint.cli import main; real = sys.stderr.write\n"
        "def write(text):\n"
        "    if '{word}' in text: real(f'first word: {{\"torch\" in sys.modules}}'); sys.stderr.flush(); sys.exit(0)\n"
        "    return real(text)\n"
        "sys.stderr.write = write\n"
        "main.main({arguments})"
    )
    for word, arguments in (("starts with", ["serve", "--port", "0"]), ("starts with", ["generate", "--prompt", "x"])):
        shown = _run(watch.format(word=word, arguments=arguments), None)
        assert "first word: False" in shown, shown
    ours, theirs = pty.openpty()
    _run(watch.format(word="loading", arguments=["chat", "-q", "x"]), theirs)
    os.close(theirs)
    assert b"first word: False" in os.read(ours, 10_000)
    os.close(ours)


def _run(program: str, terminal: int | None) -> str:
    errors = subprocess.PIPE if terminal is None else terminal
    done = subprocess.run([sys.executable, "-c", program], stderr=errors, text=True, timeout=120, check=False)
    return done.stderr or ""

"""What a command does with the streams that it is given, and with Ctrl-C: never a traceback."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.main import main
from tests.cli.test_cli import model, run

__all__ = ["model"]

FORKPOINT = [sys.executable, "-m", "forkpoint"]
DEMO = Path(__file__).parents[2] / "demo_model"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
MAX_STARTUP_MODULES = 12


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [*FORKPOINT, "simulate", "chat:sessions=1"]
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False)
    lines = [line for line in shown.stderr.splitlines() if not line.startswith(("\r", " "))]
    assert (shown.returncode, lines[-1:]) == (2, ["error: No space left on device"])
    assert "Exception ignored" not in shown.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*FORKPOINT, "simulate", "chat:sessions=1"]
    shown = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False)
    os.close(writing)
    assert shown.returncode == 0 and "Exception" not in shown.stderr and "error" not in shown.stderr


@pytest.mark.parametrize("command", [["generate"], ["chat"]])
def test_closed_streams_are_empty_ones(
    model: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    code = main([*command, "--model", model, "--log-level", "error"])
    error = capsys.readouterr().err
    assert "NoneType" not in error
    assert (code, error) == (
        (0, "") if command == ["chat"] else (2, "error: the prompt is empty; give at least one token\n")
    )


def test_processes_of_a_command_have_the_streams_that_it_lacks() -> None:
    """Otherwise the next file or socket that they open has the number of standard error."""
    child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    code = "import subprocess, sys; from forkpoint.cli.main import _prepare_streams; _prepare_streams(); "
    code += f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closing, sys.executable, "-c", code], check=False).returncode == 0


def stream_of(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def test_input_that_is_no_text_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, code in (["generate"], 2), (["chat"], 1):
        monkeypatch.setattr(sys, "stdin", stream_of(b"ab\xff\nhello\n"))
        assert main([*command, "--model", model, "--log-level", "error", "--max-tokens", "2"]) == code
        shown = capsys.readouterr()
        assert "error: character 2 of the prompt is the lone surrogate U+DCFF" in shown.err or "U+DCFF" in shown.err
        assert shown.err.count("error") == 1
    assert shown.out.count("prompt tokens cached") == 1  # the conversation went on


def test_output_that_the_locale_lacks_is_told_by_number(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert (
        main(["chat", "--model", model, "--max-tokens", "90", "-q", "hi", "--seed", "3", "--log-level", "error"]) == 0
    )
    assert b"\\u" in written.getvalue() or b"\\x" in written.getvalue()


def test_an_interrupted_stream_ends_with_130(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forkpoint.engine.core import EngineCore

    step, steps = EngineCore.step, itertools.count()

    def interrupted(core: EngineCore, *arguments: Any) -> Any:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(core, *arguments)

    monkeypatch.setattr(EngineCore, "step", interrupted)
    options = ["generate", "--model", model, "--stream", "--max-tokens", "500", "--ignore-eos", "--prompt", "x"]
    assert run(options, monkeypatch) == 130
    shown = capsys.readouterr()
    assert 2 <= len(shown.out) < 100 and "prompt tokens cached" in shown.err


class Slow(io.StringIO):
    """A terminal that takes longer than a small model's step: Ctrl-C comes while it shows the third character."""

    def write(self, text: str) -> int:
        before = self.tell()
        count = super().write(text)
        if before < 3 <= self.tell():
            raise KeyboardInterrupt  # as the handler of the signal does
        return count


@pytest.mark.parametrize(("command", "code"), [(["chat"], 0), (["generate", "--stream"], 130)])
def test_ctrl_c_while_an_answer_is_shown_stops_it_alone(
    command: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Slow())
    # Of the shipped model, which says words: of made-up weights all may be held back until the end.
    options = [*command, "--model", str(DEMO), "--max-tokens", "99", "--ignore-eos", "--temperature", "0"]
    assert run(options, monkeypatch, "first\nsecond\n") == code
    told = screen.getvalue() if command == ["chat"] else capsys.readouterr().err
    assert told.count("prompt tokens cached") == (2 if command == ["chat"] else 1)


def test_ctrl_c_is_handled_from_the_start() -> None:
    """What is imported before `main` runs could only be interrupted with a traceback."""
    code = "import sys; import forkpoint.cli.main; print(sum(name.startswith('forkpoint') for name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) <= MAX_STARTUP_MODULES


def test_ctrl_c_while_the_command_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forkpoint.cli.parser.build_parser", interrupt)
    assert main(["generate"]) == 130

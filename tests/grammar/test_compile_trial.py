"""Compiling in worker processes: bounded, cancelled when nobody waits, ended with the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkpoint.errors import InvalidParamsError
from forkpoint.grammar import compile_trial
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenGrammar
from forkpoint.grammar.starts import GrammarStarts, Starting
from forkpoint.params import SamplingParams, StructuredOutputsParams
from tests.engine.tokenizers import byte_level

PLENTY_S = 60.0
# The automaton of their least common multiple has more states than any memory.
ENDLESS = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 7919}]}
# Each leads to the next: following them goes deeper than the stack.
DEEP = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}


@pytest.fixture(scope="module")
def starts() -> Iterator[GrammarStarts]:
    tokenizer = byte_level()
    found = GrammarStarts(GrammarCompiler(tokenizer, 407, {tokenizer.eos_token_id or 0}))
    finished(begin(found, regex="warm up"))
    yield found
    found.close()


def begin(starts: GrammarStarts, **options: Any) -> Starting:
    return starts.start(SamplingParams(structured_outputs=StructuredOutputsParams(**options)), {1})


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PLENTY_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def finished(starting: Starting) -> Any:
    eventually(starting.done)
    return starting.result()


def workers(starts: GrammarStarts) -> list[int]:
    assert starts._workers is not None
    return sorted(starts._workers._pool._pool_manager.worker_manager.workers)


def test_what_takes_too_long_is_refused_and_others_go_on(starts: GrammarStarts) -> None:
    slow = begin(starts, json=ENDLESS)
    assert isinstance(finished(begin(starts, regex="warm up")), TokenGrammar), "it is known, so it waits for nobody"
    assert isinstance(finished(begin(starts, regex="[a-z]{3}")), TokenGrammar)
    assert not slow.done(), "these were there before the slow one was given up"
    with pytest.raises(InvalidParamsError, match=r"json took more than 2 s to compile"):
        finished(slow)


def test_who_leaves_takes_the_work_along(starts: GrammarStarts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "MAX_COMPILE_S", PLENTY_S)
    slow = [begin(starts, json={**ENDLESS, "title": str(i)}) for i in range(2 * compile_trial.NUM_WORKERS)]
    eventually(lambda: sum(one._trial is not None and one._trial.running() for one in slow) == 3)
    for one in slow:
        one.cancel()
    assert isinstance(finished(begin(starts, regex="[a-z]{4}")), TokenGrammar)


def test_a_killed_worker_ends_its_request_alone(starts: GrammarStarts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "MAX_COMPILE_S", PLENTY_S)
    slow = begin(starts, json={**ENDLESS, "title": "killed"})
    eventually(lambda: slow._trial is not None and slow._trial.running())
    for pid in workers(starts):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidParamsError, match="its process ended"):
        finished(slow)
    assert isinstance(finished(begin(starts, regex="[a-z]{5}")), TokenGrammar)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "a^b"}, "regex cannot be compiled: .*lookarounds"),
        ({"json": {"$defs": {**DEEP, "d2000": {}}, "$ref": "#/$defs/d0"}}, "its process ended"),
        ({"grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(9000))}, "grammar"),
        ({"regex": "("}, "regex cannot be compiled"),
        ({"json": {"type": "string", "pattern": "("}}, "uses 'pattern' at /"),
        ({"json": {"allOf": 3}}, "uses 'allOf' at /"),
        ({"regex": "(" * 65 + "a" + ")" * 65}, "nested too deep"),
        ({"grammar": "root ::= " + "(" * 65 + '"a"' + ")" * 65}, "nested too deep"),
        ({"structural_tag": "[" * 65 + "]" * 65}, "nested too deep"),
    ],
)
def test_what_is_passed_over_or_wrong_is_refused(
    starts: GrammarStarts, wanted: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidParamsError, match=message) as error:
        finished(begin(starts, **wanted))
    assert "/project/cpp" not in str(error.value)
    assert "Warning" not in capfd.readouterr().err


def test_parentheses_that_mean_themselves_are_not_counted(starts: GrammarStarts) -> None:
    assert finished(begin(starts, regex=r"\(" * 70 + "[(((]" * 30))
    assert finished(begin(starts, grammar='root ::= "' + "(" * 70 + '"'))


def test_what_is_kept_of_descriptions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.grammar.compiler.MAX_KEPT_TEXT", 2000)
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, 407, {1})
    for i in range(50):
        compiler.start(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a" * 100 + str(i))), {1})
    assert 1 < len(compiler._grammars) <= 10


ENGINE = """
import sys, time
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.starts import GrammarStarts
from forkpoint.params import SamplingParams, StructuredOutputsParams
from tests.grammar.test_compile_trial import ENDLESS, begin, finished, workers
from tests.engine.tokenizers import byte_level
from forkpoint.grammar import compile_trial
if __name__ == "__main__":
    compile_trial.MAX_COMPILE_S = 600.0
    starts = GrammarStarts(GrammarCompiler(byte_level(), 407, {1}))
    finished(begin(starts, regex="abc"))
    busy = begin(starts, json=ENDLESS)
    while busy._trial is None or not busy._trial.running():
        time.sleep(0.01)
    print(*workers(starts), flush=True)
    time.sleep(600)
"""


def test_workers_end_with_the_engine_even_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # the script imports this file
    engine = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    timer = threading.Timer(PLENTY_S, engine.kill)
    timer.start()
    try:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == compile_trial.NUM_WORKERS
    finally:
        timer.cancel()
        engine.kill()
        engine.wait()
    eventually(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

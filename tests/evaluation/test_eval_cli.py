from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import evaluation.__main__ as eval_command
from evaluation import modes, preempting, sensitivity
from evaluation.mutations import MUTATIONS
from evaluation.options import MODES
from evaluation.sensitivity import measure_sensitivity
from forkpoint.cli.main import main
from tests.evaluation.eval_suite import make_suite, write_model

ENGINE = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("eval-cli"))


@pytest.fixture(autouse=True)
def suite(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_command, "held_out_suite", lambda seed, count: make_suite(model, count, least_turns=3))


def test_the_modes_that_the_command_names_are_those_that_there_are() -> None:
    assert tuple(modes.MODES) == MODES


def test_a_table_a_sentence_and_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    given = [model, "--num-examples", "3", "--modes", "warm", "preempted", "--json", str(results), *ENGINE]
    assert main(given, eval_command.build_parser) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cold", "warm", "preempted"]
    assert lines[-1] == "the answers agree with those of the cold cache within the noise: warm, preempted"
    content = json.loads(results.read_text())
    assert content["problems"] == [] and content["modes"]["preempted"]["counters"]["num_preemptions"] > 0


def test_a_mode_that_does_nothing_fails(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preempting.PreemptingPlanner, "schedule", lambda self: self._scheduler.schedule())
    assert main([model, "--num-examples", "2", "--modes", "preempted", *ENGINE], eval_command.build_parser) == 1
    assert "FAILED preempted: it did not do what its name says" in capsys.readouterr().out


def test_mutations(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With one fault, which twelve questions are enough for; the others: test_eval_mutations.py."""
    lost = tuple(mutation for mutation in MUTATIONS if mutation.name == "one block early")
    monkeypatch.setattr(eval_command, "measure_sensitivity", partial(measure_sensitivity, mutations=lost))
    assert main(["--model", model, "--num-examples", "4", "--mutations", *ENGINE], eval_command.build_parser) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fault of the checkpoint")
    assert lines[-1].startswith("answers become wrong: one block early")


def test_faults_that_are_not_seen_fail(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sensitivity, "mutated", lambda arena, served, mutation: nullcontext())
    assert main([model, "--num-examples", "2", "--mutations", *ENGINE], eval_command.build_parser) == 1
    shown = capsys.readouterr().out
    for name in ("one block early", "swapped", "8 bits, by value", "8 bits, one scale"):
        assert f"FAILED {name}: " in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num-examples", "0"], "num_examples=0"),
        (["--modes", "hot"], "unknown mode 'hot'"),
        (["--mutations", "--modes", "warm"], "leave out --modes"),
        (["--mutations", "--checkpoint-interval", "128"], "evaluation sets checkpoint_interval itself"),
        (["--kv-cache-memory-bytes", "9"], "evaluation sets kv_cache_memory_bytes itself"),
        (["--model", "MODEL"], "given twice"),
        (["--modes", "cold", "--json", "/nowhere/results.json"], "is not a folder"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    model: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model if argument == "MODEL" else argument for argument in arguments]
    few = [] if "--num-examples" in given else ["--num-examples", "1"]
    assert main([model, *few, *given, *ENGINE], eval_command.build_parser) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error

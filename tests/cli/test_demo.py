from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_model import RandomModelSpec, make_random_model
from forkpoint.cli.main import main
from forkpoint.cli.model import choose_model
from forkpoint.demo import model as demo_model
from forkpoint.demo.conversation import DemoTurn
from forkpoint.demo.scenarios import Measurement, Row, run_demo
from forkpoint.demo.shown import table, transcript
from forkpoint.engine.inputs import Prompt
from forkpoint.errors import ConfigError
from tests.conftest import TINY


def test_the_checkpoint_is_the_same_every_time_and_made_once(tmp_path: Path) -> None:
    first, second = make_random_model(tmp_path / "a", TINY), make_random_model(tmp_path / "b", TINY)
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    make_random_model(first, TINY)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    make_random_model(first, replace(TINY, seed=1))
    assert (first / "model.safetensors").stat().st_mtime_ns != stamp


def test_a_lost_state_changes_the_answer(tmp_path: Path) -> None:
    """With transformers: zeroing the states of a 64-token prefix moves logits by half their spread or more."""
    from transformers import AutoModelForCausalLM

    folder = make_random_model(tmp_path, RandomModelSpec(hidden_size=128, num_layers=4, intermediate_size=256))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(32, 127, (1, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits[0, 64:, 32:127]
        errors = []
        for lose in (False, True):
            cache = model(ids[:, :64], use_cache=True).past_key_values
            for layer in cache.layers if lose else []:
                for name in ("recurrent_states", "conv_states"):
                    states = getattr(layer, name, None)
                    for state in states.values() if isinstance(states, dict) else [states]:
                        if state is not None:
                            state.zero_()
            logits = model(ids[:, 64:], past_key_values=cache).logits[0, :, 32:127]
            errors.append(((logits - expected).square().mean().sqrt() / expected.std()).item())
    kept, lost = errors
    assert lost > 0.5 and lost > 1000 * kept


def test_the_demo_prints_identical_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_random_model(tmp_path, TINY))
    assert main(["demo", "--model", model, "--max-tokens", "4", "--log-level", "error"]) == 0
    out, warned = capsys.readouterr()
    begun, measuring, left_out = warned.splitlines()
    assert (begun.split()[0], measuring.split()[0]) == ("Answering", "Measuring")
    assert left_out.startswith("the method mtp is left out: ")
    shown, _, drafted = out.partition("\n\nOne long answer")
    methods = [line.split() for line in drafted.splitlines()[4:]]
    assert [(name, count, same) for name, count, *_, same in methods] == [("none", "40", "yes"), ("ngram", "40", "yes")]
    lines = shown.splitlines()
    header, rows, last = lines[0], lines[2:-2], lines[-1]
    assert header.split()[0] == "scenario" and "cached tokens" in header
    assert len({len(line) for line in lines[:-2]}) == 1
    assert last == f"{len(rows)} of {len(rows)} outputs identical with the cache on and off"
    cached = {line[:26].strip(): int(line[26:].split()[1].replace(",", "")) for line in rows}
    prompt = {line[:26].strip(): int(line[26:].split()[0].replace(",", "")) for line in rows}
    assert cached["chat, turn 1"] == cached["fork, original"] == 0
    for name in ("chat, turn 2", "chat, turn 3", "one system prompt, user 2"):
        assert cached[name] > 0.8 * prompt[name]
    assert 0 < cached["fork, first branch"] < cached["fork, second branch"]


def test_the_chat_goes_on_from_the_models_own_answers_and_is_told_turn_by_turn(tmp_path: Path) -> None:
    model = str(make_random_model(tmp_path, TINY))
    chat, _ = run_demo(model, max_tokens=3, options={"dtype": "float32", "log_level": "error"})
    lines = transcript(chat).splitlines()
    assert [line.removeprefix("user       ") for line in lines[:-2:2]] == [row.turn.text for row in chat]
    assert all(line.startswith("assistant  ") for line in lines[1:-2:2])
    assert "uncached" in lines[1] and "(right: " in lines[1]  # random weights are not right
    assert lines[-1] == f"{sum(row.right for row in chat)} of {len(chat)} answers right"
    lengths = [len(row.on.prompt.token_ids) for row in chat]
    assert lengths == sorted(lengths) and chat[-1].on.num_cached_tokens > lengths[-2] - 64


def test_a_right_answer_is_counted_and_a_wrong_one_is_corrected() -> None:
    prompt = Prompt(np.arange(9, dtype=np.int32))
    turn = DemoTurn("What is my name?", "Nora")
    right, wrong = (
        Measurement(prompt, "Nora", (1, 2), 4, 0.5, 1.0, 2),
        Measurement(prompt, "Ben", (1, 3), 0, 1.0, 1.0, 2),
    )
    shown = transcript([Row("a", turn, right, right), Row("b", turn, wrong, wrong)]).splitlines()
    assert shown[1] == "assistant  Nora  [4 of 9 prompt tokens cached, first token after 500 ms, uncached 500 ms]"
    assert shown[3].startswith("assistant  Ben   [0 of 9") and shown[3].endswith("  (right: Nora)")
    assert shown[-1] == "1 of 2 answers right"


def test_a_difference_is_told() -> None:
    prompt = Prompt(np.arange(9, dtype=np.int32))
    turn = DemoTurn("And gate?", "ab")
    on, off = Measurement(prompt, "ab", (1, 2), 4, 0.5, 1.0, 2), Measurement(prompt, "ac", (1, 3), 0, 1.0, 1.0, 2)
    shown = table([Row("a", turn, on, on), Row("b", turn, on, off)])
    assert "NO" in shown and "2.0x" in shown and "1 of 2 outputs identical" in shown


def test_without_a_model_that_of_the_checkout_is_taken_and_elsewhere_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_model, "CHECKOUT", tmp_path / "site-packages")
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    run_batch = ["run-batch", "-i", str(batch), "-o", str(tmp_path / "answers.jsonl")]
    loading = (["generate", "--prompt", "x"], ["chat", "-q", "x"])
    for command in (["serve"], ["demo"], run_batch, *loading):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: no model was given") and "--model" in error and "checkout" in error
        assert error.count("\n") == 1
    folder = make_random_model(tmp_path / "demo_model", TINY)
    assert demo_model.default_model() == str(folder)
    assert main(["demo", "--max-tokens", "2", "--log-level", "error"]) == 0
    assert "answers right" in capsys.readouterr().out
    for command in loading:
        assert main([*command, "--max-tokens", "2", "--cpu-ops", "torch", "--log-level", "error"]) == 0


def test_one_model_is_loaded() -> None:
    assert choose_model({"model": "a"}) == choose_model({}, "a") == "a"
    with pytest.raises(ConfigError, match="given twice"):
        choose_model({"model": "a"}, "b")

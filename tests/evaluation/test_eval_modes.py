"""The modes on a small model: each does what its name says, and a cache that errs is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from evaluation import evaluate as evaluate_module
from evaluation import modes, preempting
from evaluation.evaluate import Evaluation, ModeResult, evaluate
from evaluation.modes import MODES
from evaluation.report import as_json, summary, table
from forkpoint.cache.lease import Lease
from forkpoint.cache.lookup import NOTHING
from forkpoint.cache.manager import CacheManager
from forkpoint.errors import ConfigError
from tests.evaluation.eval_suite import OPTIONS, Example, make_suite, write_model

ALL = tuple(MODES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("eval-modes"))


@pytest.fixture(scope="module")
def suite(model: str) -> list[Example]:
    return make_suite(model, 6, least_turns=4)


def run(model: str, suite: list[Example], names: tuple[str, ...], **options: Any) -> Evaluation:
    return evaluate(model, suite, modes=names, seed=0, options={**OPTIONS, **options})


def by_name(evaluation: Evaluation) -> dict[str, ModeResult]:
    return {result.mode.name: result for result in evaluation.results}


@pytest.fixture(scope="module")
def default(model: str, suite: list[Example]) -> Evaluation:
    return run(model, suite, ALL)


def test_every_mode_did_what_it_says(default: Evaluation) -> None:
    assert default.problems == [] and default.skipped == ()
    found = {name: result.sitting.counters for name, result in by_name(default).items()}
    assert tuple(found) == ALL
    assert found["cold"].num_cached_tokens == found["cold"].num_preemptions == 0
    assert found["warm"].num_cached_tokens > 0.8 * default.num_prompt_tokens
    assert found["forked"].num_cached_tokens > 0
    assert found["preempted"].num_preemptions >= default.num_questions
    assert found["pressure"].num_checkpoints_evicted > 0 and found["pressure"].num_cached_tokens > 0
    assert found["ngram"].num_draft_tokens > 0 and found["mtp"].num_draft_tokens > 0
    assert found["warm"].num_draft_tokens == 0
    assert found["warm"].num_checkpoints_evicted == found["forked"].num_checkpoints_evicted == 0


def test_answers_are_those_of_the_cold_cache(default: Evaluation) -> None:
    for name, result in by_name(default).items():
        siblings = 2 if name == "forked" else 1
        assert {task: count.num for task, count in result.score.tasks.items()} == {
            "even": 3 * siblings,
            "odd": 3 * siblings,
        }
        assert result.forks.num == 12 * siblings and result.accuracy.num == 18 * siblings
        if name != "bf16":
            assert result.agreement.num_identical == result.agreement.num
            assert result.score.total.accuracy == result.forks.accuracy == 1.0
            assert result.agreement.largest_change < 1e-3
    assert by_name(default)["bf16"].agreement.largest_change > 1e-3


def test_deterministic_mode_is_exact(model: str, suite: list[Example]) -> None:
    evaluation = run(model, suite, ALL, deterministic=True)
    assert evaluation.problems == [] and "bf16" in evaluation.skipped[0]
    assert [result.mode.name for result in evaluation.results] == [name for name in ALL if name != "bf16"]
    assert all(result.agreement.is_exact for result in evaluation.results)
    assert "bit for bit" in summary(evaluation)[-1]


def test_the_report_has_a_column_for_each_mode(default: Evaluation) -> None:
    lines = table(default).splitlines()
    assert lines[0].split() == list(ALL)
    rows = {line[:30].strip(): line[30:].split() for line in lines}
    assert rows["task even"] == ["3/3", "3/3", "6/6", "3/3", "3/3", *rows["task even"][5:]]
    assert rows["became wrong / right"][:4] == ["-", "0", "/", "0"]
    assert len({len(line) for line in lines[2:4]}) == 1
    assert json.loads(json.dumps(as_json(default)))["modes"]["warm"]["agreement_with_cold"]["num"] == 18
    assert summary(default)[-1].startswith("the answers agree")


def test_modes_that_a_model_cannot_do_are_left_out(tmp_path: Path) -> None:
    weights, model = tmp_path / "model.safetensors", write_model(tmp_path)
    save_file({k: v for k, v in load_file(weights).items() if not k.startswith("mtp.")}, weights, {"format": "pt"})
    evaluation = run(model, make_suite(model, 1), ("mtp",))
    assert [result.mode.name for result in evaluation.results] == ["cold"]
    assert "mtp is left out" in evaluation.skipped[0] and "no MTP head" in evaluation.skipped[0]


def faults(evaluation: Evaluation) -> str:
    return " / ".join(evaluation.problems)


def test_no_preemption_is_a_failure(model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preempting.PreemptingPlanner, "schedule", lambda self: self._scheduler.schedule())
    told = faults(run(model, suite, ("preempted",)))
    assert "preempted: it did not do what its name says" in told and "no request was preempted" in told


def test_no_eviction_is_a_failure(model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "TIGHT_MARGIN", 20.0)
    monkeypatch.setattr(modes, "TIGHT_SLOTS", 500)
    assert "no checkpoint was evicted" in faults(run(model, suite, ("pressure",)))


def test_prompts_that_are_not_cached_are_a_failure(
    model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes.Paper, "ample_bytes", property(lambda paper: paper.tight_bytes))
    assert "prompts seen before were not cached up to their last boundary" in faults(run(model, suite, ("warm",)))


def test_siblings_that_find_nothing_are_a_failure(
    model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheManager, "lookup", lambda *arguments: NOTHING)
    told = faults(run(model, suite, ("forked", "pressure")))
    assert "forked: it did not do what its name says: no token came from the cache" in told
    assert "pressure: it did not do what its name says: no token came from the cache" in told


def test_a_cache_that_stays_on_is_a_failure(model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    on = dataclasses.replace(MODES["cold"], options=lambda paper: {})
    monkeypatch.setattr(evaluate_module, "MODES", {**MODES, "cold": on})
    monkeypatch.setattr(evaluate_module, "COLD", on)
    assert "which is to be off" in faults(run(model, suite, ()))


def test_a_wrong_state_breaks_the_promise(model: str, suite: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Lease.read_slot.fget
    assert right is not None
    monkeypatch.setattr(Lease, "read_slot", property(lambda self: -1 if self.read_from else right(self)))
    evaluation = run(model, suite, ("warm",), deterministic=True)
    assert "promises the answers of the cold cache bit for bit" in faults(evaluation)
    assert "accuracy differs from the cold cache's beyond noise" in faults(evaluation)
    assert summary(evaluation)[-1].startswith("FAILED warm")


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [(("hot",), {}, "unknown mode 'hot'"), ((), {"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes")],
)
def test_what_is_refused(
    model: str, suite: list[Example], names: tuple[str, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run(model, suite, names, **options)

"""`benchmarks.speculation` on a tiny model; what it makes of its samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.random_model import make_random_model
from benchmarks.speculation import Sample, compare
from forkpoint.cli.main import main
from tests.engine.conftest import TINY


def test_all_methods_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speculation, "QUESTIONS", ("again and again",))
    model = str(make_random_model(tmp_path, TINY))
    flags = ["--model", model, "--output-len", "70", "--num-rounds", "1", "--max-model-len", "256"]
    assert main([*flags, "--log-level", "error"], speculation.build_parser) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == speculation.TITLES and len(title) == len(rows[0])
    methods = [(method, when) for when in ("new", "again", "alike") for method in ("none", "ngram", "suffix", "cache")]
    assert [tuple(row.split()[:2]) for row in rows] == methods
    assert all(row.endswith(" 1 of 1") for row in rows)
    steps = {key: float(row.split()[-4]) for key, row in zip(methods, rows, strict=True)}
    assert steps["cache", "again"] > steps["none", "again"] == 1
    assert main(["--num-rounds", "0"], speculation.build_parser) != 0


def test_the_best_round_counts_and_other_ids_are_seen() -> None:
    plain = [Sample(4.0, 3.0, 8, ((1, 2, 3, 4), (5, 6, 7, 8))), Sample(5.0, 2.0, 8, ((1, 2, 3, 4), (5, 6, 7, 8)))]
    drafts = [Sample(2.0, 2.5, 4, ((1, 2, 3, 4), (5, 6, 9, 9))), Sample(3.0, 1.0, 4, ((1, 2, 3, 4), (5, 6, 7, 8)))]
    first, second = compare({(None, "new"): plain, ("ngram", "new"): drafts})
    assert (first.clock_ratio, first.cpu_ratio, first.tokens_a_step, first.num_same) == (1, 1, 1, 4)
    assert (second.clock_ratio, second.cpu_ratio, second.tokens_a_step) == (2, 2, 2)
    assert (second.num_same, second.num_answers) == (3, 4)

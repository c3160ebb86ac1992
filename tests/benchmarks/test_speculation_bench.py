"""`benchmarks.speculation` on a tiny model; what it makes of its samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.random_model import make_random_model
from benchmarks.speculation import Sample, ask, compare
from forkpoint.cli.main import main
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from tests.conftest import TINY


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


@pytest.mark.parametrize("most", [0.0, math.inf])
def test_ids_that_part_fail_unless_rounding_explains_it(
    most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With drafts each answer, that is every other one, ends in an id that is not the likeliest, but the second."""
    turns = itertools.cycle((False, True))
    monkeypatch.setattr(speculation, "QUESTIONS", ("again and again",))
    monkeypatch.setattr(speculation, "METHODS", (None, "ngram"))
    monkeypatch.setattr(speculation, "MOST_MARGIN", most)

    def ask_wrongly(llm: LLM, params: SamplingParams, form: str) -> Sample:
        sample = ask(llm, params, form)
        if next(turns):
            ((*answer, last),) = sample.answers
            inputs = [{"prompt_token_ids": [*sample.prompts[0], *answer]}]
            (told,) = llm.generate(inputs, replace(params, max_tokens=1, logprobs=2), use_tqdm=False)
            (other,) = {*told.outputs[0].logprobs[0]} - {last}
            sample = replace(sample, answers=((*answer, other),))
        return sample

    monkeypatch.setattr(speculation, "ask", ask_wrongly)
    flags = ["--model", str(make_random_model(tmp_path, TINY)), "--output-len", "70", "--num-rounds", "1"]
    code = main([*flags, "--max-model-len", "256", "--log-level", "error"], speculation.build_parser)
    told = capsys.readouterr()
    assert " 0 of 1" in told.out and code == (most == 0)
    assert told.err.count("ids part from plain decoding's") == 3 * code


def test_the_best_round_counts_and_other_ids_are_seen() -> None:
    right, wrong = ((1, 2, 3, 4), (5, 6, 7, 8)), ((1, 2, 3, 4), (5, 6, 9, 9))
    plain = [Sample(4.0, 3.0, 8, right, ()), Sample(5.0, 2.0, 8, right, ())]
    drafts = [Sample(2.0, 2.5, 4, wrong, ()), Sample(3.0, 1.0, 4, right, ())]
    first, second = compare({(None, "new"): plain, ("ngram", "new"): drafts})
    assert (first.clock_ratio, first.cpu_ratio, first.tokens_a_step, first.num_same) == (1, 1, 1, 4)
    assert (second.clock_ratio, second.cpu_ratio, second.tokens_a_step) == (2, 2, 2)
    assert (second.num_same, second.num_answers) == (3, 4)

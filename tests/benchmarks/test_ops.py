"""The operator benchmark runs and prints a line per operator."""

from __future__ import annotations

import pytest

from benchmarks import ops
from forkpoint.ops.select import operator_names
from tests.ops.cpu_table import cpp_module


def test_it_prints_one_line_per_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpp_module()
    monkeypatch.setattr(ops, "machine_rates", lambda: (1e10, 1e11))
    monkeypatch.setattr("sys.argv", ["ops", "--only", "conv_update"])
    ops.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("conv_update, 1 row")


def test_every_case_names_an_operator() -> None:
    names = {case.name.split(",")[0].split()[0] for case in ops.cases()}
    assert names <= set(operator_names())
    assert {"linear", "recurrence_prefill", "recurrence_decode", "paged_attention", "conv_update", "silu_mul"} <= names

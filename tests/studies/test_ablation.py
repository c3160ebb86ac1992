"""What each rule is worth: every one can be switched off, and its lines are counted."""

from __future__ import annotations

import pytest

from studies.ablation import RULES, main


def test_a_row_for_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat:sessions=4,turns=3,answer=60", "--model", "kimi-linear", "--memory", "1", "--jobs", "1"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["rule", "lines", "chat 1"] and len(rows) == 3 + len(RULES)
    assert [row[0] for row in rows[3:]] == [rule.name for rule in RULES]
    assert all(row[1].isdigit() and float(row[2]) == pytest.approx(0, abs=100) for row in rows[3:])
    assert max(int(row[1]) for row in rows[3:]) > 50

"""The simulator's studies from the command line: emulations, the bound, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forkpoint.config import SchedulerConfig
from forkpoint.sim.cost import H200
from forkpoint.sim.shape import KIMI_LINEAR
from forkpoint.sim.workload import make_workload
from studies.report import ReportPlan, write_report
from studies.simulate import main
from studies.systems import CLAIRVOYANT


def test_peers_beside_the_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    systems = f"forkpoint;forkpoint:capture=dense,eviction=lru;vllm;sglang;{CLAIRVOYANT}"
    arguments = ["chat:sessions=8,turns=3", "--memory", "4,8", "--systems", systems, "--bound", "--json", str(out)]
    assert main([*arguments, "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 6 and sum("no policy exceeds" in line for line in lines) == 2
    results = json.loads(out.read_text())
    assert [result["system"] for result in results] == systems.split(";") * 2
    assert all(0 < result["hit_rate"] < 1 and result["ttft_p95_s"] > 0 for result in results)


def test_a_system_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat:sessions=2", "--systems", "other"]) == 2
    assert "error: no system" in capsys.readouterr().err


def test_a_report(tmp_path: Path) -> None:
    trace = make_workload("rag:questions=8,documents=2,length=600")
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    plan = ReportPlan((trace,), H200, scheduler, 1, shapes=(KIMI_LINEAR,), systems=("forkpoint", "vllm", CLAIRVOYANT))
    counted: list[int] = []
    write_report(plan, tmp_path, counted.append)
    assert sum(counted) == plan.num_requests
    page = (tmp_path / "README.md").read_text()
    assert "## Kimi-Linear-48B-A3B, rag" in page and page.count("| bound") == 1
    assert len(json.loads((tmp_path / "results.json").read_text())) == 15
    pytest.importorskip("matplotlib")
    assert (tmp_path / "kimi-linear-48b-a3b-rag.png").stat().st_size > 10_000

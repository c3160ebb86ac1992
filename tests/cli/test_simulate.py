"""`forkpoint simulate` from the command line: tables, reports, and errors told in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.cli.main import main
from forkpoint.config import SchedulerConfig
from forkpoint.sim.cost import H200
from forkpoint.sim.report import Panel, ReportPlan, write_report
from forkpoint.sim.shape import KIMI_LINEAR
from forkpoint.sim.sweep import Case, run_case
from forkpoint.sim.systems import CLAIRVOYANT
from forkpoint.sim.workload import make_workload

CHAT = "chat:sessions=8,turns=3"


def test_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    systems = "forkpoint;forkpoint:capture=dense,eviction=lru;vllm;sglang"
    arguments = ["simulate", CHAT, "--memory", "4,8", "--systems", systems, "--bound", "--json", str(out)]
    assert main([*arguments, "--replicas", "2", "--router", "prefix-aware", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 5 and sum("no policy exceeds" in line for line in lines) == 2
    results = json.loads(out.read_text())
    assert [result["system"] for result in results] == systems.split(";") * 2
    assert all(0 < result["hit_rate"] < 1 and result["ttft_p95_s"] > 0 for result in results)


def test_options_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"{CHAT}@sessions=0.5,max_tokens=4000", "--memory", "8", "--jobs", "1"]) == 0
    assert "chat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no trace"),
        (["nothing.jsonl"], "does not exist"),
        ([CHAT, "--model", "gpt"], "no model shape"),
        ([CHAT, "--device", "abacus"], "no device"),
        ([CHAT, "--memory", "much"], "GiB"),
        ([CHAT, "--systems", "other"], "no system"),
        ([CHAT, "--systems", "forkpoint:capture=none"], "no policy"),
        ([CHAT + "@users=3"], "trace option"),
        ([CHAT, "--memory", "0.01"], "bytes"),
        ([CHAT, "--steps", "nothing.json"], "measured steps"),
        ([CHAT, "--jobs", "0"], "jobs=0"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("hit_tokens", "known", "answer"),
    [(40, 0.3, "yes"), (39, 0.39, "no, nor do known chances"), (39, 0.5, "no")],
)
def test_half_the_gap(hit_tokens: int, known: float, answer: str) -> None:
    """From 20 % of the best peer to a bound of 60 %."""
    trace = make_workload("rag:questions=2,documents=1,length=600")
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    result = replace(run_case(Case(trace, KIMI_LINEAR, H200, "vllm", 1 << 34, scheduler)), prompt_tokens=100)
    results = {(1, "forkpoint"): replace(result, hit_tokens=hit_tokens), (1, "vllm"): replace(result, hit_tokens=20)}
    assert Panel(KIMI_LINEAR, trace, (1,), results, {1: 0.6}, {1: known}).half_way(1) == answer


def test_a_report(tmp_path: Path) -> None:
    trace = make_workload("rag:questions=8,documents=2,length=600")
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=64)
    plan = ReportPlan((trace,), H200, scheduler, 1, shapes=(KIMI_LINEAR,), systems=("forkpoint", "vllm", CLAIRVOYANT))
    counted: list[int] = []
    write_report(plan, tmp_path, counted.append)
    assert sum(counted) == plan.num_requests
    page = (tmp_path / "README.md").read_text()
    assert "Kimi-Linear-48B-A3B, rag" in page and page.count("| bound") == page.count("| known chances") == 1
    assert len(json.loads((tmp_path / "results.json").read_text())) == 15
    pytest.importorskip("matplotlib")
    assert (tmp_path / "kimi-linear-48b-a3b-rag.png").stat().st_size > 10_000

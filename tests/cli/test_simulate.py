"""`forkpoint simulate` from the command line: tables, and errors told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forkpoint.cli.main import main

CHAT = "chat:sessions=8,turns=3,answer=80"


def test_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    systems = "forkpoint;forkpoint:capture=dense,eviction=lru"
    arguments = ["simulate", CHAT, "--memory", "4,8", "--systems", systems, "--json", str(out)]
    assert main([*arguments, "--replicas", "2", "--router", "prefix-aware", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2
    results = json.loads(out.read_text())
    assert [result["system"] for result in results] == systems.split(";") * 2
    assert all(0 < result["hit_rate"] < 1 and result["ttft_p95_s"] > 0 for result in results)


def test_a_host_tier_keeps_what_the_memory_does_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, results = tmp_path / "results.json", []
    for flags in ([], ["--host-memory", "16"], ["--host-memory", "16", "--host-rate", "1"]):
        common = ["--memory", "1", "--json", str(out), "--jobs", "1"]
        arguments = ["simulate", "chat:sessions=10,answer=100", *common, *flags]
        assert main(arguments) == 0
        table = capsys.readouterr().out
        assert ("from the host tier" in table) == bool(flags) and "from the disk tier" not in table
        results.append(json.loads(out.read_text())[0])
    alone, tier, slow = results
    assert alone["restored_tokens"] == 0 < tier["restored_tokens"] and alone["system"] == "forkpoint"
    assert tier["system"] == "forkpoint:host_memory=16"
    assert tier["hit_rate"] > alone["hit_rate"] and slow["ttft_mean_s"] > tier["ttft_mean_s"]


def test_dtypes_change_the_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, results = tmp_path / "results.json", []
    kept = (["--kv-cache-dtype", "fp8"], ["--mamba-ssm-cache-dtype", "bfloat16"], ["--quantization", "fp8"])
    for flags in ([], *kept):
        assert main(["simulate", CHAT, "--memory", "16", "--json", str(out), "--jobs", "1", *flags]) == 0
        results.append(json.loads(out.read_text())[0])
    plain, keys, states, weights = results
    for name in ("hit_rate", "kv_written_bytes", "state_written_bytes"):
        assert weights[name] == plain[name]
    assert weights["ttft_mean_s"] < plain["ttft_mean_s"]  # decode steps read half the weights
    assert keys["kv_written_bytes"] * 128 == plain["kv_written_bytes"] * 65  # 256 values, 4 bytes of scale
    assert states["kv_written_bytes"] == plain["kv_written_bytes"]
    assert states["state_written_bytes"] < 0.55 * plain["state_written_bytes"]
    assert plain["hit_rate"] == keys["hit_rate"] == states["hit_rate"]


@pytest.mark.parametrize("name", ["falcon-mamba-7b", "kimi-linear-48b-a3b"])
def test_folders_without_keys_or_with_latents(name: str, tmp_path: Path) -> None:
    config = Path(__file__).parents[1] / "models" / "hub_configs" / f"{name}.json"
    (tmp_path / "config.json").write_text(config.read_text())
    out = tmp_path / "results.json"
    arguments = ["simulate", CHAT, "--memory", "4", "--model", str(tmp_path), "--json", str(out), "--jobs", "1"]
    assert main(arguments) == 0
    (result,) = json.loads(out.read_text())
    assert result["hit_rate"] > 0.5 and result["state_written_bytes"] > 0
    assert (result["kv_written_bytes"] > 0) == name.startswith("kimi")


def test_options_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"{CHAT}@sessions=0.5,max_tokens=4000", "--memory", "8", "--jobs", "1"]) == 0
    assert "chat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no trace"),
        (["nothing.jsonl"], "does not exist"),
        (["traces/nothing"], "trace traces/nothing does not exist; give a file, a folder"),
        (["chats:sessions=2.5"], "no workload 'chats'; give one of chat, agents, rag, tree, or a trace file"),
        (["chat", "--memory", "1e30"], "--memory '1e30' is not allowed; give GiB above 0, at most 1,048,576"),
        ([CHAT, "--model", "gpt"], "no model shape"),
        ([CHAT, "--model", "kimi-linear", "--kv-cache-dtype", "fp8"], "attention over latent"),
        ([CHAT, "--memory", "much"], "GiB"),
        ([CHAT, "--systems", "other"], "no system"),
        ([CHAT, "--systems", "forkpoint:capture=none"], "no capture policy"),
        ([CHAT + "@users=3"], "trace option"),
        ([CHAT, "--memory", "0.01"], "bytes"),
        ([CHAT, "--jobs", "0"], "jobs=0"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error

"""The side-by-side benchmark of whole engines: its values, its files and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import gpu_peer, peer_table
from benchmarks.gpu_9b.shape import write_config
from benchmarks.peer_run import Measure, PeerRun, read_run
from tests.benchmarks.test_gpu_9b import SHAPE

OURS = PeerRun(
    engine="forkpoint",
    versions={"python": "3.12.3", "forkpoint": "0.1.0"},
    drafts=0,
    shorter=1,
    config={"vocab_size": 512},
    card="NVIDIA H200",
    commit="0123abc",
    date="2026-11-23",
    command="python -m benchmarks.gpu_peer forkpoint",
    measures=(
        Measure("decode, batch 32", "tokens/s", 5991.2, (5990.0, 5991.2, 6000.0)),
        Measure("900 tokens, sent again", "ms", 8.7, (8.7,), (896,), is_detail=True),
    ),
)
THEIRS = replace(
    OURS,
    engine="vllm",
    versions={"vllm": "0.33.0"},
    drafts=2,
    command="python -m benchmarks.gpu_peer vllm --drafts 2",
    measures=(
        Measure("decode, batch 32", "tokens/s", 5103.0),
        Measure("900 tokens, sent again", "ms", 31.8, (31.0, 32.6), (0, 528), is_detail=True),
        Measure("imports and engine start", "s", 170.6),
    ),
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "ours.json", tmp_path / "theirs.json"]
    for path, run in zip(paths, (OURS, THEIRS), strict=True):
        run.write(path)
        assert read_run(path) == run
    return list(map(str, paths))


def test_two_files_make_the_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    peer_table.main(files)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:5] == [
        "| | forkpoint | vLLM 0.33.0, 2 drafts |",
        "|---|---|---|",
        "| decode, batch 32 | 5,991 tokens/s | 5,103 tokens/s |",
        "| imports and engine start |  | 170.6 s |",
        "",
    ]
    assert all(fact in shown for fact in (OURS.command, THEIRS.command, "NVIDIA H200", "0123abc", "vllm 0.33.0"))
    peer_table.main(["--details", *files])
    cells = "| 900 tokens, sent again | 8.7 ms, 896 cached | 31.8 ms, 0 to 528 cached |"
    assert cells in capsys.readouterr().out.splitlines()


def test_runs_that_cannot_be_compared_are_an_error(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    replace(THEIRS, card="NVIDIA H100").write(Path(files[1]))
    peer_table.main(files)
    assert "| | forkpoint (NVIDIA H200) | vLLM 0.33.0, 2 drafts (NVIDIA H100) |" in capsys.readouterr().out
    replace(THEIRS, config={"vocab_size": 1024}).write(Path(files[1]))
    with pytest.raises(SystemExit):
        peer_table.main(files)
    assert "ran different models" in capsys.readouterr().err
    Path(files[1]).write_text('{"measures": [1]}')
    with pytest.raises(SystemExit):
        peer_table.main(files)
    assert f"{files[1]} does not hold a run" in capsys.readouterr().err


def test_a_run_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "model", SHAPE) / "config.json"
    out = tmp_path / "forkpoint.json"
    flags = ["--config", str(config), "--shorter", "20", "--repeats", "1", "--batches", "1", "--json", str(out)]
    gpu_peer.main(["forkpoint", *flags, "--parts", "first_token,forks"])
    run, printed = read_run(out), capsys.readouterr().out
    assert all(measure.line in printed for measure in run.measures)
    assert {measure.name: measure.num_cached for measure in run.measures[:3]} == {
        "imports and engine start": (),
        "time to first token, 16,384-token prompt": (0,),
        "the same prompt and 128 new tokens": (16_384 // 20 // 64 * 64,),
    }
    assert len(run.measures) == 3 + 5
    assert run.title == "forkpoint" and run.config["vocab_size"] == SHAPE.vocab_size and run.versions["torch"]


class FixedEngine:
    """Takes a second and a hundredth for each token of the longest answer. All but 10 tokens of prompts are cached."""

    llm = SimpleNamespace(reset_prefix_cache=lambda: None)

    def run(self, prompts: list[list[int]], num_tokens: int | list[int]) -> tuple[float, list[Any]]:
        num_tokens = max(num_tokens) if isinstance(num_tokens, list) else num_tokens
        answer = [SimpleNamespace(token_ids=[1] * num_tokens)]
        outputs = [SimpleNamespace(num_cached_tokens=len(ids) - 10, outputs=answer) for ids in prompts]
        return 1 + num_tokens / 100, outputs


def test_rates_and_shares_come_from_the_times_of_the_calls() -> None:
    protocol = gpu_peer.Protocol(cast(gpu_peer.Engine, FixedEngine()), 512, [1, 8], repeats=2, shorter=1)
    found = {m.name: m for m in (*protocol.decode(), *protocol.agents(), *protocol.chat())}
    for batch in (1, 8):
        for name in (f"decode, batch {batch}", f"decode, batch {batch}, next 128 tokens"):
            assert found[name].samples == (batch * 100.0,) * 2 and found[name].value == batch * 100
    assert found["agent loop: 32 conversations of 10 turns"].value == pytest.approx(10 * 1.64)
    num_prompt = sum(4000 + turn * 764 for turn in range(10))
    share = found["prompt tokens cached in that loop"].value
    assert share == pytest.approx(100 * (1 - 100 / num_prompt), abs=0.05)
    assert found["chat turns at 2,000 to 4,000 tokens, slowest of 10"].samples == (1010.0,) * 10
    assert [measure.num_cached for measure in protocol.prompts()][:2] == [(990,) * 2, (1090,) * 2]
    found = {m.name: m for m in (*protocol.mixed(), *protocol.long())}
    mixed, cold, warm, *rates = found.values()
    assert 3.9 <= mixed.value <= 4
    assert (cold.num_cached, warm.num_cached) == ((99_990,) * 2, (100_118,) * 2)
    assert [rate.value for rate in rates] == [100, 100, 1600, 1600]

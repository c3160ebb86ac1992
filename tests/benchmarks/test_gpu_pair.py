"""The benchmark of a pair of GPUs, on a CPU and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_pair import PairSizes, run_pair
from tests.benchmarks.test_model131m import SMALL


def test_a_pair_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = {"prompt": 320, "repeats": 1, "stream_prompt": 20, "num_streams": 2, "num_arrivals": 2}
    sizes = PairSizes(**few, every_s=0.3, pause_s=0.0, arena_gib=0.05, max_num_seqs=6)
    found = run_pair(tmp_path / "model", SMALL, sizes, "cpu")
    assert found["first_token_ms"]["pair"][0] >= found["first_token_ms"]["prefill"][0] > 0
    pauses = found["pauses_s"]
    assert pauses["pair"]["num_peer_tokens"] == 2 * 256 and len(pauses["pair"]["first_tokens"]) == 2
    assert pauses["fetched"]["num_peer_tokens"] == 2 * 256
    assert pauses["alone"]["num_peer_tokens"] == pauses["one"]["num_peer_tokens"] == 0
    assert min(found["first_token_ms"]["tcp"] + found["first_token_ms"]["early"]) > 0
    assert capsys.readouterr().out.count("\n") == 9

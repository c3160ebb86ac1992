"""An engine for a folder in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.random_model import make_random_model
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from tests.conftest import TINY
from tests.fp8_checkpoints import put_in_fp8


def test_a_folder_in_fp8_answers_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_in_fp8(make_random_model(tmp_path / "plain", TINY), tmp_path / "fp8", "block")
    question, params = [{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(str(tmp_path / "fp8"), max_model_len=256, log_level="info") as llm:
        first, again = (llm.chat(question, params, use_tqdm=False)[0].outputs[0] for _ in range(2))
    assert len(first.token_ids) == 8 and first.token_ids == again.token_ids
    assert "weights FP8" in capsys.readouterr().err

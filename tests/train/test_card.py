"""The model card of a run."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tests.train.small import TOKENIZER_FILE, small_model
from train.card import main
from train.storage import save_model

LOSSES = {"loss_scored": 1.5, "mtp_loss_scored": 2.0, "loss_said": 0.5, "mtp_loss_said": 0.7}
SCORES = {
    "num_dialogues": 3,
    "by_group": {"fact": {"512": [9, 10], "6144": [3, 4]}, "total": {"512": [1, 2]}},
    "answer_drafts": [80, 100],
    "turn_drafts": [9, 10],
}


def write_run(folder: Path, tokenizer_sha256: str) -> None:
    save_model(small_model(), folder, 1, 2)
    report = {
        "options": {"seed": 0, "start_from": None, "tokens_per_batch": 1024, "matrix_rate": 0.02, "other_rate": 0.003},
        "num_parameters": 123456,
        "device": "GPU",
        "tokenizer_sha256": tokenizer_sha256,
        "log": [{"step": n, "num_tokens": n * 1024, "elapsed_s": n, **LOSSES} for n in (1, 20)],
        "dialogues": SCORES,
        "suite": SCORES,
    }
    (folder / "run.json").write_text(json.dumps(report))


def test_card_tells_counts_and_comes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "run", hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest())
    monkeypatch.setattr(sys, "argv", ["card", str(tmp_path / "run"), "--into", str(tmp_path / "model")])
    main()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| fact | 90.0 % of 10 | 75.0 % of 4 |" in card and "| all | 83.3 % of 12 | 75.0 % of 4 |" in card
    assert "80 of 100 (80.0 %" in card.replace("80.0%", "80.0 %")
    assert {p.name for p in (tmp_path / "model").iterdir()} >= {
        "loss.png",
        "config.json",
        "model.safetensors.index.json",
    }


def test_a_run_with_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", "0" * 64)
    monkeypatch.setattr(sys, "argv", ["card", str(tmp_path / "run"), "--into", str(tmp_path / "model")])
    with pytest.raises(SystemExit):
        main()
    assert not (tmp_path / "model").exists()

"""A model that has not passed its tests on a device is refused there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkpoint import LLM
from forkpoint.errors import UnsupportedModelError
from forkpoint.platforms.cpu import CpuPlatform
from tests.checkpoints import write_checkpoint


def test_a_model_that_failed_on_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen4_exp")
    monkeypatch.setattr(CpuPlatform, "shares_memory", False)
    with pytest.raises(UnsupportedModelError, match="has not passed its tests on cpu yet; run it with device='cpu'"):
        LLM(str(tmp_path), skip_tokenizer_init=True, log_level="error")

"""No request meets a kernel that a GPU would have to compile for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import write_checkpoint

FEW_TILES = {"num_attention_heads": 16, "num_key_value_heads": 4}  # of a thousand tokens, which share out their keys


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3_5", FEW_TILES, ["20000"]),
        ("kimi_linear", {}, ["20000"]),
        ("kimi_linear", {}, ["4000", '{"kv_cache_memory_bytes": 1073741824}']),  # steps of several prompts
    ],
)
def test_what_requests_meet_was_tried_at_the_start(
    family: str, sizes: dict[str, Any], options: list[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family, dtype=torch.bfloat16, max_position_embeddings=20000, **sizes)
    command = [sys.executable, "-m", "tests.worker.untried", str(tmp_path), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not found.stdout

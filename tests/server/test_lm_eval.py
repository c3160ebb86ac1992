"""lm-eval with a cold cache and a warm one. Skipped without lm-eval, here or where LM_EVAL_PYTHON says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import RunningServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "lm_eval_cold_warm.py"


def test_scores_do_not_depend_on_the_cache(server: RunningServer, tiny_model: Path) -> None:
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip("needs lm-eval[api], in this environment or in that of the interpreter that LM_EVAL_PYTHON names")
    command = [python, str(SCRIPT), "--url", server.url, "--tokenizer", str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("warm the same") == 3

"""How OpenMP's threads wait, which it reads when torch is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from forkpoint import LLM

class Tells:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise SystemExit

sys.meta_path.insert(0, Tells())
LLM(".")
"""


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_it_is_set_before_torch_is_loaded_unless_the_environment_says(given: dict[str, str], spins: str) -> None:
    program = PROGRAM.replace("LLM(", f"os.environ.update({given!r})\nLLM(")
    shown = subprocess.run(["env", "-u", "GOMP_SPINCOUNT", "-u", "OMP_WAIT_POLICY", sys.executable, "-c", program],
        capture_output=True, text=True, check=True)  # fmt: skip
    assert shown.stdout.strip() == spins

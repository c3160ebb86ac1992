"""Tests which operators Triton serves, and that a machine without a GPU never loads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forkpoint.ops.select import select_table
from forkpoint.ops.table import STATE_OPERATORS, operator_names

MULTIPLY = {"attend", "expanded", "key_scan", "key_pairs", "key_inverse", "record", "record_heads", "amd_record"}
MULTIPLY |= {"pool_attend", "pool_scores", "prefill_warps"}
MULTIPLY_FP8 = {"linear", "experts", "expert_warps", "packed", "shortlist", "decode", "prefill"}
MULTIPLY_FP8 |= {"fragments_of_integers", "fragments_of_floats"}


def test_the_table_of_a_gpu() -> None:
    table = select_table("triton", False, False)
    served = {name for name, backend in table.backends.items() if backend.startswith("triton")}
    assert served == set(operator_names())
    assert table.redirects == frozenset(STATE_OPERATORS)
    assert select_table("triton", True, True).redirects == frozenset()


@pytest.mark.parametrize(
    ("module", "count", "multiply"), [("compile_families", 46, MULTIPLY), ("compile_fp8", 40, MULTIPLY_FP8)]
)
def test_kernels_compile_for_hopper(module: str, count: int, multiply: set[str]) -> None:
    """The interpreter takes what the compiler refuses, such as a shape that is made at run time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.ops.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == count
    for name, num_instructions in lines:
        assert (int(num_instructions) > 0) == (name in multiply)


def test_a_cpu_does_without_triton() -> None:
    code = "import sys; from forkpoint.ops.select import select_table; select_table('torch', False, False)"
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}; print('forkpoint.ops.triton_table' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "False"

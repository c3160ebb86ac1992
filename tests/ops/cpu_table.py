"""The C++ operators for tests, compiled once per session."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from forkpoint.ops.cpu.build import CpuBuild, load_operators
from forkpoint.ops.cpu.table import cpp_table
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable


@functools.cache
def _build() -> CpuBuild:
    return load_operators()


def cpp_module() -> Any:
    """Return the operators. Skips the calling test, or test module, where something that a build needs is missing."""
    built = _build()
    assert "did not build or load" not in built.reason, built.reason
    if built.module is None:
        pytest.skip(built.reason, allow_module_level=True)
    return built.module


def cpp(deterministic: bool = False, *, tiles: bool | None = None) -> OpTable:
    """Return the table of these operators. Skips as `cpp_module` does."""
    return cpp_table(cpp_module(), torch_table(deterministic), tiles)

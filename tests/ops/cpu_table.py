"""The C++ table for tests, compiled once per session, or the printed reason why it cannot be."""

from __future__ import annotations

import functools

import pytest

from forkpoint.ops.cpu.build import CpuBuild, load_operators
from forkpoint.ops.cpu.table import cpp_table
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable


@functools.cache
def build() -> CpuBuild:
    return load_operators()


def cpp(tiles: bool | None = None) -> OpTable:
    """Return the table. Skips the calling test module where something that a build needs is missing."""
    built = build()
    assert "did not build or load" not in built.reason, built.reason
    if built.module is None:
        pytest.skip(built.reason, allow_module_level=True)
    return cpp_table(built.module, torch_table(), tiles)

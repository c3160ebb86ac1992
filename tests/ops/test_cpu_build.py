"""Compiling, finding no compiler, and what the table says about itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from forkpoint.errors import ConfigError
from forkpoint.ops.cpu.build import load_operators
from forkpoint.ops.cpu.table import cpp_table
from forkpoint.ops.select import operator_names, select_table, torch_table
from tests.ops.cpu_table import build


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    built = load_operators()
    assert built.module is None
    assert "no-such-compiler" in built.reason
    with pytest.raises(ConfigError, match="no-such-compiler"):
        select_table("cpp", False, False)
    table = select_table("auto", False, False)
    assert "no-such-compiler" in table.backends["linear"]
    assert table.linear is torch_table().linear


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*|*-dumpfullversion*) echo 12.2.0;; *) exit 1;; esac\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built = load_operators()
    assert built.module is None
    assert "did not build" in built.reason


def test_every_operator_is_named_and_redirects() -> None:
    module = build().module
    if module is None:
        pytest.skip(build().reason)
    for deterministic in (False, True):
        table = cpp_table(module, torch_table(deterministic), tiles=False)
        assert set(table.backends) == set(operator_names())
        by_torch = {name for name, backend in table.backends.items() if not backend.startswith("cpp")}
        assert by_torch == {"route", "greedy", "sample_rows", "apply_penalties", "apply_bitmasks"}
        assert table.deterministic is deterministic
        assert table.redirects
    assert not dataclasses.replace(table, redirects=frozenset()).redirects


def test_matrix_tiles_take_many_rows() -> None:
    module = build().module
    if module is None:
        pytest.skip(build().reason)
    table = cpp_table(module, torch_table(), tiles=True)
    assert "tiles" in table.backends["linear"]
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x, w = torch.randn(40, 96).to(dtype), torch.randn(48, 96).to(dtype)
        packed = table.prepare_linear(w, None)
        exact = x.double() @ w.double().T
        for rows in (1, 12, 13, 40):
            got = table.linear(x[:rows], packed).double()
            assert (got - exact[:rows]).abs().max() <= 8e-3 * exact.abs().max()
    fixed = cpp_table(module, torch_table(True), tiles=True)
    assert not fixed.backends["linear"].startswith("cpp")
    assert fixed.backends["gdn_prefill"].startswith("cpp")

"""Compiling, finding no compiler, and what the table says about itself."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkpoint.errors import ConfigError
from forkpoint.ops.cpu import build as cpu_build
from forkpoint.ops.cpu.build import load_operators
from forkpoint.ops.select import select_table, torch_table
from forkpoint.ops.table import operator_names
from tests.ops.cpu_table import cpp, cpp_module


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


def test_a_user_without_a_home_folder_gets_the_operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    built = load_operators()
    assert built.module is None
    assert "set HOME or XDG_CACHE_HOME" in built.reason


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    built = load_operators()
    assert built.module is None
    assert f"{tmp_path / 'file'}" in built.reason and "set XDG_CACHE_HOME" in built.reason


def test_a_build_works_after_one_that_failed(tmp_path: Path) -> None:
    source, library, marker = tmp_path / "one.cpp", tmp_path / "key" / f"{cpu_build.NAME}.so", tmp_path / "complete"
    cpp_module()
    source.write_text("#error wrong\n")
    with pytest.raises(RuntimeError, match="#error wrong"):
        cpu_build._compile([source], library, marker)
    source.write_text('extern "C" int one() { return 1; }\n')
    cpu_build._compile([source], library, marker)
    assert marker.exists() and ctypes.CDLL(str(library)).one() == 1


def test_a_failed_build_names_its_error_and_no_warning_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch warns of compilers other than that of its own build."""
    if (missing := cpu_build._missing_for_compiling()) is not None:
        pytest.skip(missing)
    compiler = tmp_path / "other-c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *version*) echo 12.2.0; esac\n')  # it writes no library
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = cpu_build.load_operators()
    assert built.module is None and "did not build or load: Could not load this library" in built.reason


def test_a_stopped_build_leaves_nothing_that_the_next_one_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compilers of the stopped one may still run, and write into its folder."""
    library, marker, places = tmp_path / "key" / f"{cpu_build.NAME}.so", tmp_path / "key" / "complete", list[Path]()

    def build_here(place: str, sources: list[str]) -> None:
        places.append(Path(place))
        (places[-1] / library.name).write_text(f"build {len(places)}")
        if len(places) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(cpu_build, "_run_compilers", build_here)
    with pytest.raises(KeyboardInterrupt):
        cpu_build._compile([], library, marker)
    assert not library.exists() and not marker.exists()
    places[0].mkdir()
    (places[0] / library.name).write_text("half")
    cpu_build._compile([], library, marker)
    assert library.read_text() == "build 2" and marker.exists() and len(set(places)) == 2
    assert {path.name for path in library.parent.iterdir()} == {library.name, marker.name, "forkpoint.lock"}


FORK = """
import os, sys, threading, time
from pathlib import Path
def fork(started, forked):
    while not os.path.exists(started):
        time.sleep(0.01)
    if not (pid := os.fork()):
        time.sleep(600)
        os._exit(0)
    Path(forked + ".new").write_text(str(pid))
    os.rename(forked + ".new", forked)
threading.Thread(target=fork, args=sys.argv[-2:]).start()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])  # raised there, and the end without a word
def test_a_stopped_build_stops_its_compilers(tmp_path: Path, number: signal.Signals) -> None:
    """Also if a fork of the process that builds lives on and has a copy of its pipes."""
    if (missing := cpu_build._missing_for_compiling()) is not None:
        pytest.skip(missing)
    slow, started, source = tmp_path / "slow-c++", tmp_path / "started", tmp_path / "one.cpp"
    forked = tmp_path / "forked"
    answers = 'case "$*" in *--version*|*-dumpfullversion*) echo 12.2.0; exit;; esac'
    slow.write_text(f"#!/bin/sh\n{answers}\necho $$ > {started}.new; mv {started}.new {started}; exec sleep 600\n")
    slow.chmod(0o755)
    source.touch()
    code = f"{FORK}from forkpoint.ops.cpu.build import _compile\n"
    code += "_compile([Path(sys.argv[1])], *map(Path, sys.argv[2:4]))"
    places = [str(source), str(tmp_path / "key" / f"{cpu_build.NAME}.so"), str(tmp_path / "complete")]
    places += [str(started), str(forked)]
    with subprocess.Popen([sys.executable, "-c", code, *places], env={**os.environ, "CXX": str(slow)}) as builder:
        until_s = time.monotonic() + 60
        while not forked.exists():
            assert builder.poll() is None and time.monotonic() < until_s, "no compiler was started"
            time.sleep(0.01)
        builder.send_signal(number)
    compiler, until_s = int(started.read_text()), time.monotonic() + 20
    try:
        status = Path(f"/proc/{compiler}/stat")
        while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < until_s, "the compiler runs on"
            time.sleep(0.01)
    finally:
        for pid in (compiler, int(forked.read_text())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_every_operator_is_named_and_redirects() -> None:
    for deterministic in (False, True):
        table = cpp(deterministic, tiles=False)
        standing_in = {"store_rows", "mix_residuals", "choose_pools", "pool_attention"}  # of every table
        assert set(table.backends) == {*operator_names(), *standing_in}
        by_torch = {name for name, backend in table.backends.items() if not backend.startswith("cpp")}
        recorded, sampling = {"recurrence_record", "recurrence_flush"}, {"apply_penalties", "apply_bitmasks"}
        assert by_torch == {"route", "greedy", "sample_rows", *recorded, *sampling}
        assert table.deterministic is deterministic
        assert table.redirects
    assert not dataclasses.replace(table, redirects=frozenset()).redirects


def test_who_computes_what_with_matrix_tiles() -> None:
    assert "tiles" in cpp(tiles=True).backends["paged_attention"]
    fixed = cpp(deterministic=True, tiles=True).backends
    assert fixed["linear"] == fixed["paged_attention"] == fixed["recurrence_prefill"] != "torch"


def test_the_code_that_products_leave_behind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 numbers of rows, in a process of its own: the bounds are read once."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    code = """if True:
        import torch
        from forkpoint.platforms.cpu import CpuPlatform
        def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
        CpuPlatform()
        torch.set_num_threads(1)
        weights = [torch.randn(512, width).bfloat16() for width in (256, 320, 384, 448)]
        def run(rows):
            for weight in weights:
                torch.nn.functional.linear(torch.ones(rows, weight.shape[1], dtype=torch.bfloat16), weight)
        for rows in range(13, 100): run(rows)
        before = rss()
        for rows in range(100, 300): run(rows)
        print(rss() - before)
    """
    for name in names:
        monkeypatch.delenv(name, raising=False)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(shown.stdout) < 60

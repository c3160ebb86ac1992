"""A function in a process of its own, with limits."""

from __future__ import annotations

import os
import time

import pytest

from forkpoint.engine.bounded import OverLimitError, run_bounded

MIB = 2**20


def endless() -> None:
    while True:
        pass


def raises() -> None:
    raise ValueError("wrong")


def test_results_and_errors_come_back_from_another_process() -> None:
    pid, result = run_bounded(lambda: (os.getpid(), "x" * MIB), cpu_s=5, memory_bytes=64 * MIB)
    assert pid != os.getpid() and len(result) == MIB
    with pytest.raises(ValueError, match="wrong"):
        run_bounded(raises, cpu_s=5, memory_bytes=MIB)


def test_what_needs_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OverLimitError):
        run_bounded(endless, cpu_s=1, memory_bytes=MIB)
    with pytest.raises(OverLimitError):
        run_bounded(lambda: len(b"x" * (512 * MIB)), cpu_s=5, memory_bytes=64 * MIB)
    monkeypatch.setattr("forkpoint.engine.bounded.WALL_S", 0.1)
    with pytest.raises(OverLimitError):  # it waits and needs nothing
        run_bounded(lambda: time.sleep(60), cpu_s=5, memory_bytes=64 * MIB)

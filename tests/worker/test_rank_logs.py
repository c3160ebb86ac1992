"""What ranks write into the log of their engine."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from forkpoint.config import EngineConfig
from forkpoint.obs.logs import LOGGER
from forkpoint.worker.remote import serve_worker


@pytest.mark.parametrize("log_level", ["info", "error"])
def test_a_rank_logs_what_may_be_its_own(
    log_level: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ranks log while they are built is the same for all, and only the first one logs it."""

    def build(*_: Any) -> Any:
        LOGGER.warning("a field of the model is unknown")
        return SimpleNamespace(facts=0)

    monkeypatch.setattr("forkpoint.worker.remote.begin_child", lambda: None)
    monkeypatch.setattr("forkpoint.worker.build.build_worker", build)
    monkeypatch.setattr("forkpoint.worker.remote._run_plans", lambda *_: LOGGER.warning("its disk is full"))
    engine, own = multiprocessing.Pipe()
    config = EngineConfig.from_flat(model="m", log_level=log_level)
    lines = []
    for rank in (0, 1):
        serve_worker(config, rank, None, own)
        lines.append(capsys.readouterr().err.count("\n"))
    assert engine.recv() == 0
    assert lines == ([2, 1] if log_level == "info" else [0, 0])

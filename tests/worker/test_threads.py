"""OpenMP's threads sleep soon, unless the environment says how they wait."""

from __future__ import annotations

import os

import pytest

from forkpoint.worker.threads import SPINS, wait_briefly


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_goes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(known, "")
        monkeypatch.delenv(known)
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == SPINS
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv(name, "7")
    wait_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == ("7" if name == "GOMP_SPINCOUNT" else None)

"""A fake card for these tests, which are skipped without a C++ compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.random_model import make_random_model
from tests.ascend import fake_npu
from tests.engine.conftest import TINY


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture
def card() -> Iterator[fake_npu.FakeModule]:
    if not shutil.which("g++"):
        pytest.skip("a fake NPU needs g++")
    with fake_npu.card() as module:
        yield module

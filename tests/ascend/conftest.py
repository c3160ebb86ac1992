"""A fake card for these tests, which are skipped without a C++ compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.ascend import fake_npu


@pytest.fixture
def card() -> Iterator[fake_npu.FakeModule]:
    if not shutil.which("g++"):
        pytest.skip("a fake NPU needs g++")
    with fake_npu.card() as module:
        yield module

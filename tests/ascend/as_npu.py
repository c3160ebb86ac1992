"""A plugin for pytest (`-p tests.ascend.as_npu`): a fake NPU is here, so that `auto` takes it."""

from __future__ import annotations

import pytest

from tests.ascend import fake_npu


@pytest.fixture(autouse=True, scope="session")
def _card() -> object:
    with fake_npu.card():
        yield

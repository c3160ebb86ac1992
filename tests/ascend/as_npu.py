"""A plugin for pytest (`-p tests.ascend.as_npu`): installs a fake NPU, which `auto` then takes."""

from __future__ import annotations

import pytest

from tests.ascend import fake_npu


@pytest.fixture(autouse=True, scope="session")
def _card() -> object:
    with fake_npu.card():
        yield

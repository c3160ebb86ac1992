"""Runs the models that forkpoint refuses on GPUs, as tests that may fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkpoint.models.qwen4_exp import Qwen4Exp


@pytest.fixture(autouse=True, scope="session")
def refused_models_run() -> None:
    Qwen4Exp.needs_host = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # those of all folders
        if "qwen4_exp" in item.name and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xfail(reason="has not run on a GPU since conv_prefill was fixed"))

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.engine.llm import LLM
from tests.engine.compare import Oracle
from tests.engine.real import ModelBank


@pytest.fixture(scope="module")
def bank(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> ModelBank:
    return ModelBank(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def oracle(bank: ModelBank) -> Oracle:
    return Oracle(bank)


@pytest.fixture(scope="session")
def shared_llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=1024, log_level="warning", seed=7) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    assert shared_llm.reset_prefix_cache()
    return shared_llm

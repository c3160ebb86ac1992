"""Vocabularies, and a server whose latencies are told to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.engine.tokenizer import Tokenizer
from tests.bench.serve_tokenizer import make_word_tokenizer
from tests.client.fake_server import fake_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def vocabulary(folder: str) -> Vocabulary:
    return Vocabulary(Tokenizer.load(folder))


@pytest.fixture(scope="module")
def byte_vocabulary(tiny_model: Path) -> Vocabulary:
    return Vocabulary(Tokenizer.load(str(tiny_model)))


@pytest.fixture
def server(folder: str) -> Any:
    with fake_server() as running:
        running.models[0]["root"] = folder
        yield running

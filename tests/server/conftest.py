from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from forkpoint.engine.llm import LLM
from tests.server.running import RunningServer, start_server

MAX_MODEL_LEN = 512
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.reasoning_content }}{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
REQUEST_LOG = "requests.jsonl"
EVENTS = {"endpoint": "ipc://{}/events", "replay_endpoint": "ipc://{}/replay"}


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests that leave it alive."""
    flags = ["--served-model-name", "tiny", "alias", "--max-model-len", str(MAX_MODEL_LEN), "--seed", "7"]
    folder = tmp_path_factory.mktemp("server")
    flags += ["--enable-dev-endpoints", "--enable-tokenizer-info-endpoint"]
    flags += ["--log-interval-s", "0.5", "--log-requests", str(folder / REQUEST_LOG)]
    events = {name: endpoint.format(folder) for name, endpoint in EVENTS.items()}
    flags += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    running = start_server(tiny_model, folder, *flags)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


@pytest.fixture(scope="session")
def thinker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of two keys that keeps two responses, and names ids in log-probabilities.

    Its template opens a reasoning part unless told not to.
    """
    flags = ["--api-key", "one", "other", "--max-stored-responses", "2", "--chat-template", THINKS]
    flags += ["--return-tokens-as-token-ids"]
    running = start_server(tiny_model, tmp_path_factory.mktemp("thinker"), *flags, "--served-model-name", "tiny")
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(str(tiny_model), max_model_len=MAX_MODEL_LEN, seed=7, log_level="warning") as llm:
        yield llm

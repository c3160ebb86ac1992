"""What holds for all tests.

Triton kernels run under its interpreter where there is no GPU, which must be said before Triton is imported. No test
with generated examples fails because the machine is slow, and each run generates the same ones. To look for others:
`pytest --hypothesis-profile=search`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from benchmarks.random_model import RandomModelSpec, make_random_model

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Collecting the tests makes a million objects that all stay. Each full garbage collection would examine them.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, without the objects that collecting the tests made."""
    gc.collect()
    gc.freeze()
    gc.enable()


os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the servers that tests start need not compile us each time
search = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", search)
settings.register_profile("repeatable", search, derandomize=True)
settings.load_profile("repeatable")


TINY = RandomModelSpec(
    hidden_size=64,
    num_layers=4,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_k_heads=2,
    num_v_heads=4,
    state_dim=32,
    max_position_embeddings=2048,
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_logger() -> None:
    """Give each test the logger of a new process: an engine of an earlier test would hide log lines from `caplog`."""
    logger = logging.getLogger("forkpoint")
    logger.setLevel(logging.NOTSET)
    logger.handlers, logger.propagate = [], True


if torch.cuda.is_available():  # several processes share a GPU

    @pytest.fixture(autouse=True)
    def give_back_memory() -> Iterator[None]:
        """What a test's tensors had, which the allocator would keep."""
        yield
        torch.cuda.empty_cache()

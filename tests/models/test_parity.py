"""Models against transformers' uncached single pass over the same tokens, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.models.decoder import Model
from forkpoint.models.registry import load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver, Work

TOLERANCE = 1e-4  # of the logits' standard deviation
LENGTH = 200


@dataclass
class Pair:
    family: str
    ours: Model
    theirs: Any
    tokens: list[int]
    want: Tensor


@torch.no_grad()
def oracle(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(folder, request.param)
    ours = load_model(folder, ops=torch_table())
    tokens = torch.randint(2, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    yield Pair(request.param, ours, theirs, tokens, oracle(theirs, tokens))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def test_prefill_in_one_piece(pair: Pair) -> None:
    driver = Driver(pair.ours)
    assert error(driver.prefill(driver.row(), pair.tokens), pair.want) <= TOLERANCE


@pytest.mark.parametrize("cuts", [[1], [63, 64, 65], [2, 5, 100, 103], [64, 128, 192], [130, 199]])
def test_prefill_in_chunks(pair: Pair, cuts: list[int]) -> None:
    driver = Driver(pair.ours)
    assert error(driver.prefill(driver.row(), pair.tokens, cuts), pair.want) <= TOLERANCE


def test_decode(pair: Pair) -> None:
    driver = Driver(pair.ours)
    row = driver.row()
    driver.prefill(row, pair.tokens[:70])
    got = [driver.run([Work(row, [token], decode=True)])[0] for token in pair.tokens[70:140]]
    assert error(torch.cat(got), pair.want[70:140]) <= TOLERANCE


def test_decode_from_the_first_token(pair: Pair) -> None:
    driver = Driver(pair.ours)
    row = driver.row()
    got = [driver.run([Work(row, [token], decode=True)])[0] for token in pair.tokens[:6]]
    assert error(torch.cat(got), pair.want[:6]) <= TOLERANCE

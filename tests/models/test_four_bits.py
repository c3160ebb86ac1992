"""Folders in 4 bits: every packing against the same weights widened, with torch's and the C++ operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table
from tests.checkpoints import write_checkpoint
from tests.driver import Driver
from tests.four_bit_checkpoints import FORMATS, put_in_four_bits
from tests.models.test_parity import TOLERANCE, error

TOKENS = list(range(2, 102))


def logits(folder: Path, ops: str = "torch", **options: Any) -> torch.Tensor:
    driver = Driver(load_model(folder, ops=select_table(ops, False, False), **{"dtype": "float32", **options}))
    return driver.prefill(driver.row(), TOKENS, [64])


@pytest.mark.parametrize("layout", FORMATS)
def test_logits_are_those_of_the_widened_weights(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", "qwen3_5_moe")
    assert put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout) > 8
    want = logits(tmp_path / "widened")
    assert error(logits(tmp_path / "packed"), want) <= TOLERANCE
    assert error(logits(tmp_path / "packed", "cpp"), want) <= TOLERANCE

"""Every family's operators on a card beside torch's on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table, torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver
from tests.fp8_checkpoints import put_in_fp8
from tests.models.test_backends import logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_device(folder: Path, dtype: str, deterministic: bool = False) -> Tensor:
    device, ops = torch.device("cuda"), select_table("triton", deterministic, False)
    return logits(Driver(load_model(folder, ops=ops, dtype=dtype, device=device), device=device))


def on_cpu(folder: Path, dtype: str) -> Tensor:
    return logits(Driver(load_model(folder, ops=torch_table(), dtype=dtype)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_torch(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    want = on_cpu(tmp_path, "float32")
    assert (on_device(tmp_path, "float32") - want).abs().max() <= 1e-3 * want.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_is_no_worse_than_torch_in_bfloat16(family: str, tmp_path: Path) -> None:
    """If activations are rounded to FP8 too, errors may be a few times as large."""
    write_checkpoint(tmp_path / "widened", family)
    put_in_fp8(tmp_path / "widened", tmp_path / "fp8", "block")
    want = on_cpu(tmp_path / "fp8", "float32").log_softmax(-1)

    def error(made: Tensor) -> float:
        return float((made.log_softmax(-1) - want).abs().mean())

    theirs = error(on_cpu(tmp_path / "fp8", "bfloat16"))
    assert error(on_device(tmp_path / "fp8", "bfloat16", deterministic=True)) <= 1.25 * theirs
    assert error(on_device(tmp_path / "fp8", "bfloat16")) <= 4 * theirs

"""Every family's operators on a card beside torch's on the CPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table, torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver
from tests.four_bit_checkpoints import FORMATS, put_in_four_bits
from tests.fp8_checkpoints import Layout, put_in_fp8
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
    """If activations are rounded to FP8 too, errors may be a few times as large.

    A router whose next expert scores the same within rounding may choose either, so 2 % of the tokens may be off.
    """
    write_checkpoint(tmp_path / "widened", family)
    put_in_fp8(tmp_path / "widened", tmp_path / "fp8", "block")
    want = on_cpu(tmp_path / "fp8", "float32").log_softmax(-1)

    def error(made: Tensor) -> float:
        of_tokens = (made.log_softmax(-1) - want).abs().mean(-1).flatten()
        return float(of_tokens.sort().values[: math.floor(0.98 * len(of_tokens))].mean())

    theirs = error(on_cpu(tmp_path / "fp8", "bfloat16"))
    assert error(on_device(tmp_path / "fp8", "bfloat16", deterministic=True)) <= 1.25 * theirs
    assert error(on_device(tmp_path / "fp8", "bfloat16")) <= 4 * theirs


@pytest.mark.parametrize("layout", FORMATS)
def test_four_bits_are_those_of_the_widened_weights(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", "qwen3_5_moe")
    put_in_four_bits(tmp_path / "widened", tmp_path / "packed", layout)
    want = on_cpu(tmp_path / "widened", "float32")
    assert (on_device(tmp_path / "packed", "float32") - want).abs().max() <= 1e-3 * want.std()
    made, widened = (on_device(tmp_path / name, "bfloat16").log_softmax(-1) for name in ("packed", "widened"))
    error, theirs = ((x - want.log_softmax(-1)).abs().mean() for x in (made, widened))
    assert error <= 1.25 * theirs


@pytest.mark.parametrize("layout", ["tensor", "modelopt", "channel"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_moe"])
def test_fp8_per_matrix_and_per_row(layout: Layout, family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "widened", family)
    put_in_fp8(tmp_path / "widened", tmp_path / "fp8", layout)
    want = on_cpu(tmp_path / "fp8", "float32").log_softmax(-1)
    theirs = (on_cpu(tmp_path / "fp8", "bfloat16").log_softmax(-1) - want).abs().mean()
    error = (on_device(tmp_path / "fp8", "bfloat16", deterministic=True).log_softmax(-1) - want).abs().mean()
    assert error <= 1.25 * theirs

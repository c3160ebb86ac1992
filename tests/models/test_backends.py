"""Every family's operators in C++ beside torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkpoint.models.registry import load_model
from forkpoint.ops.select import select_table, torch_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver, Work
from tests.fp8_checkpoints import put_in_fp8
from tests.models.test_parity import TOLERANCE, error

TOKENS = torch.randint(2, 256, (126,), generator=torch.Generator().manual_seed(7)).tolist()
FIRST, LAST = TOKENS[:90], TOKENS[120:]


def logits(driver: Driver) -> Tensor:
    """A prompt in two pieces, a fork of its state at 64, both decoding beside a third that is in prefill."""
    row, other, slot = driver.row(), driver.row(), driver.slot()
    parts = driver.run([Work(row, FIRST[:70], saves=[(64, slot)])]) + driver.run([Work(row, FIRST[70:])])
    fork = driver.fork(row, slot, 64)
    parts += driver.run([Work(fork, TOKENS[90:120])])
    for token in LAST:
        batch = [Work(row, [token], decode=True), Work(fork, [token], decode=True), Work(other, TOKENS[:70])]
        parts += driver.run(batch[: 2 if other.num_computed else 3])
    return torch.cat(parts)


def in_cpp(folder: Path) -> Tensor:
    return logits(Driver(load_model(folder, ops=select_table("cpp", False, False), dtype="float32")))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_torch_and_in_fp8_those_of_the_widened_weights(family: str, tmp_path: Path) -> None:
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    write_checkpoint(plain, family)
    assert error(in_cpp(plain), logits(Driver(load_model(plain, ops=torch_table())))) <= TOLERANCE
    put_in_fp8(plain, fp8, "block")
    assert error(in_cpp(fp8), in_cpp(plain)) <= TOLERANCE


def test_embeddings_that_are_read_again_outlive_norms_that_add_in_place(tmp_path: Path) -> None:
    """Norms on GPUs add in place from the second layer on."""
    write_checkpoint(tmp_path, "zamba2", layers_block_type=["mamba"] * 3 + ["hybrid"] * 2 + ["mamba"] * 4)
    ops = torch_table()

    def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = ops.add_rmsnorm(x, residual, weight, eps)
        return normed, residual.copy_(total)

    in_place = replace(ops, add_rmsnorm=add_rmsnorm)
    assert torch.equal(*(logits(Driver(load_model(tmp_path, ops=table))) for table in (ops, in_place)))

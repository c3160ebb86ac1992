"""Triton norms, gates and state copies, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.ops.select import torch_table
from forkpoint.ops.state_copy.kernel import StateCopy
from tests.ops.recurrence_cases import GATED_NORMS, ints, padded_pool
from tests.ops.triton_cases import DEVICE, ON_GPU, copy_pool, sized, triton_ops

OURS, TORCH = triton_ops(), torch_table()
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    assert bool((error <= ROUNDING[want.dtype] * (1 + want.double().abs())).all())


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), sized([(3, 40)], [(1, 12288), (257, 3000)]))
def test_gates(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = (randn(rows, 2 * size + 8, dtype=dtype) * 4)[:, 8:]
    close(OURS.silu_mul(gate_up), TORCH.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), sized([(5, 3, 24), (2, 1, 72)], [(300, 32, 128), (70, 20, 256)]))
def test_norms(dtype: torch.dtype, rows: int, heads: int, size: int) -> None:
    wide = randn(rows, 2 * heads * size + 16, dtype=dtype)
    x, gate = (part.unflatten(1, (heads, size)) for part in wide[:, 16:].chunk(2, 1))
    weight = randn(size)
    close(OURS.rmsnorm(x, weight, 1e-5), TORCH.rmsnorm(x, weight, 1e-5))
    for form in GATED_NORMS:
        args = (x, gate * 3, randn(heads, size) if form[0] else weight, 1e-5, *form)
        close(OURS.gated_rmsnorm(*args), TORCH.gated_rmsnorm(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), sized([(3, 100)], [(1, 4096), (333, 4096), (65, 2560), (9, 5120)]))
def test_norm_of_a_sum(dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual, weight = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype), randn(size)
    _, total = TORCH.add_rmsnorm(x, residual, weight, 1e-6)
    got, ours = OURS.add_rmsnorm(x, residual.clone(), weight, 1e-6)
    if ON_GPU:  # the interpreter cuts bfloat16 off instead of rounding it
        assert torch.equal(ours, total)
    close(ours, total)
    close(got, TORCH.rmsnorm(ours, weight, 1e-6))
    close(OURS.rmsnorm(x, weight, 1e-6), TORCH.rmsnorm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), sized([(3, 100)], [(1, 2048), (333, 2048), (9, 5120)]))
def test_mixed_residuals(dtype: torch.dtype, rows: int, size: int) -> None:
    bank, current = randn(5, rows, size, dtype=dtype), randn(rows, 2 * size, dtype=dtype)[:, :size]
    weight = randn(size) * size**-0.5 * 2
    for done, last in ((bank[:1], None), (bank[:1], current), (bank[:4], None), (bank[:4], current)):
        close(OURS.mix_residuals(done, last, weight, 1e-6), TORCH.mix_residuals(done, last, weight, 1e-6))


# (sizes of a slot, dtype) of each pool; a program copies 8,192 bytes.
WINDOW, MATRIX = ((3, 5), torch.bfloat16), ((2, 4, 4), torch.float32)
POOLS = sized(
    [
        (WINDOW, MATRIX),
        (((3, 7), torch.bfloat16),),
        (((1,), torch.bfloat16), ((4096,), torch.bfloat16), ((4097,), torch.bfloat16), ((2048,), torch.float32)),
    ],
    [(((3, 8192), torch.bfloat16), ((32, 128, 128), torch.float32))],
)
# Two rows read one slot, one names its own, one starts from nothing, and two are padding.
SRC, DST = [0, 0, -1, 2, 4, 6, -1], [1, 7, 3, -1, 5, 6, -1]


def _bits(pool: Tensor) -> Tensor:
    """A padded pool's slots as bytes, gaps included."""
    base = pool._base
    assert base is not None
    return base.view(torch.uint8).cpu()


@pytest.mark.parametrize("copy", [OURS.state_copy, StateCopy(3), TORCH.state_copy], ids=["", "taking turns", "torch"])
@pytest.mark.parametrize("shapes", POOLS)
def test_state_copy(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], copy: Any) -> None:
    """The bits that a loop over pools and rows leaves, those of any NaN too, and nothing beside the slots."""
    pools = [copy_pool(padded_pool(8, *shape)) for shape in shapes]
    want = []
    for pool in pools:
        pool[0].view(torch.uint8).view(-1)[:2] = 0xFE  # in some dtypes, and some byte orders, a NaN
        pool[4].view(torch.uint8).view(-1)[-2:] = 0xFF
        expected, slots = _bits(pool).clone(), pool.cpu()
        size, gap = slots[0].numel() * slots.element_size(), 8 * slots.element_size()
        for src, dst in zip(SRC, DST, strict=True):
            if dst >= 0:
                expected[dst, gap : gap + size] = slots[src].view(torch.uint8).view(-1) if src >= 0 else 0
        want.append(expected)
    copy(pools, ints(SRC).to(DEVICE), ints(DST).to(DEVICE))
    for pool, expected in zip(pools, want, strict=True):
        assert torch.equal(_bits(pool), expected)


def test_a_row_does_not_see_its_neighbours() -> None:
    x, weight = randn(40, 3, 24), randn(24)
    whole = OURS.rmsnorm(x, weight, 1e-6)
    for start, end in ((0, 1), (5, 7)):
        assert torch.equal(OURS.rmsnorm(x[start:end], weight, 1e-6), whole[start:end])

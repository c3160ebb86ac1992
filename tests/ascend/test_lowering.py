"""Every Triton kernel, at the shapes of models, is lowered for an Ascend 910B to IR without forbidden forms."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.__version__ != "3.2.0":
    pytest.skip("needs triton-ascend's environment: make ascend", allow_module_level=True)

import triton.language as tl  # noqa: E402

from tests.ascend.execution import MLIR  # noqa: E402
from tests.ascend.lowering import LAUNCHES, Lowered, NotLowered  # noqa: E402
from tests.ascend.on_chip import on_chip_bytes  # noqa: E402
from tests.ascend.shapes import SHAPES, Shape, calls  # noqa: E402

ON_CHIP = 192 << 10  # bytes
# Kernels with gathered loads or stores, and the most turns of the loops over rows that these become. The loads in such
# a loop lose their mask, so their indices have to be in range by themselves.
ROW_LOOPS = {
    "_order_kernel": [32],
    "product_kernel": [64],
    "_choose_kernel": [2048, 2048, 128],
}
LOST_MASKS = {"_choose_kernel": 3}  # stores of those loops, which ask before each


def of_shape(shape: Shape, deterministic: bool) -> list[Lowered]:
    LAUNCHES.seen.clear()
    LAUNCHES.run = None
    for _, call in calls(shape, deterministic):
        call()
    return list(LAUNCHES.seen.values())


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_every_kernel_is_lowered(shape: Shape, deterministic: bool) -> None:
    found = of_shape(shape, deterministic)
    assert len(found) > 30
    assert not {f"{kernel.name}: {kernel.ttir}" for kernel in found if re.search(r"\bf64\b", kernel.linalg)}
    for kernel in found:
        allowed, turns = ROW_LOOPS.get(kernel.name, []), sorted(kernel.row_loops, reverse=True)
        assert len(turns) <= len(allowed), kernel.name
        assert all(own <= most for own, most in zip(turns, allowed, strict=False)), kernel.name
        assert kernel.lost_masks <= LOST_MASKS.get(kernel.name, 0), kernel.name
    if MLIR.exists():
        own = [(on_chip_bytes(kernel), kernel.name) for kernel in found]
        assert max(own)[0] <= ON_CHIP, sorted(own)[-5:]


@triton.jit
def _tuples(x, out):
    rows = ()
    for i in tl.static_range(2):
        rows += (tl.load(x + i),)
    tl.store(out, rows[0])


@triton.jit
def _vector_of_addresses(table, out):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load((tl.load(table) + at).to(tl.pointer_type(tl.uint8))))


@triton.jit
def _three_terms(x, out):
    if tl.load(x) > 0 and tl.load(x + 1) > 0 and tl.load(x + 2) > 0:
        tl.store(out, 1)


@triton.jit
def _gathered(x, out, n):
    row, at = tl.arange(0, 16) // 2, tl.arange(0, 16)
    tl.store(out + at, tl.sum(tl.load(x + row[:, None] * n + at[None, :], mask=(at < n)[None, :], other=0), axis=1))


@triton.jit
def _between(x, out, low, high):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at, mask=(at >= low) & (at < high), other=0))


@triton.jit
def _moved_in_a_branch(x, out, n):
    at = tl.arange(0, 16)
    here, found = x + at, tl.load(x + at)
    for i in range(n):
        tl.store(out + i * 16 + at, found)
        if i + 1 < n:
            here += n
            found = tl.load(here)


REFUSED = [_tuples, _vector_of_addresses, _three_terms, _moved_in_a_branch]


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.fn.__name__)
def test_forms_that_are_refused_still_are(kernel: Any) -> None:
    """Kernels can be simpler once a version accepts these forms."""
    values = [torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.uint8), 7]
    with pytest.raises(NotLowered):
        kernel[(1,)](*values[: len(kernel.arg_names)])


def test_a_load_of_rows_that_are_no_straight_line_still_is_a_loop() -> None:
    LAUNCHES.seen.clear()
    LAUNCHES.run = None
    _gathered[(1,)](torch.zeros(200), torch.zeros(16), 11)
    (lowered,) = LAUNCHES.seen.values()
    assert lowered.row_loops == [16]


def test_a_range_whose_end_lies_before_its_beginning_still_has_a_negative_length() -> None:
    LAUNCHES.seen.clear()
    LAUNCHES.run = None
    _between[(1,)](torch.zeros(16), torch.zeros(16), 9, 5)
    (lowered,) = LAUNCHES.seen.values()
    length = re.search(r"memref\.subview %reinterpret_cast\w*\[%\w+\] \[(%\w+)\]", lowered.linalg)
    assert length is not None and f"{length[1]} = arith.subi" in lowered.linalg

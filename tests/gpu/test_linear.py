"""Matrix products at full sizes: right wherever a tile is chosen, and rows that do not see the batch, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS = (1, 2, 8, 64, 65, 256, 4096)
# [N, K] of a 9B model's products, of its halves together where they are gated.
SHAPES = {
    "recurrent_in": (12352, 4096),
    "out": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "attention_in": (10240, 4096),
    "half_of_down": (2048, 12288),
    "half_of_gate_up": (12288, 4096),
    "half_of_recurrent_in": (6176, 4096),
    "head": (151936, 4096),
    "router": (257, 2048),
}


@pytest.fixture(scope="module")
def fixed() -> OpTable:
    return select_table("triton", True, False)


@pytest.fixture(scope="module")
def fast() -> OpTable:
    return select_table("triton", False, False)


def cancelling(rows: int, outputs: int, width: int) -> tuple[Tensor, PackedLinear]:
    """Operands whose exact products are 0: each sum is the sum of its roundings, and any other order of them shows,
    which rounding to bfloat16 would hide from ordinary numbers."""
    half = width // 2
    order = torch.randperm(width, device="cuda")
    x, weight = torch.randn(rows, half, device="cuda").bfloat16(), torch.randn(outputs, half, device="cuda").bfloat16()
    return torch.cat((x, x), 1)[:, order].contiguous(), PackedLinear(torch.cat((weight, -weight), 1)[:, order], None)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_do_not_depend_on_the_batch(name: str, fixed: OpTable) -> None:
    torch.manual_seed(0)
    x, packed = cancelling(512 if name == "head" else max(ROWS), *SHAPES[name])
    whole = fixed.linear(x, packed)
    assert whole.any()
    for rows in (*ROWS, 16, 17, 32, 33, 128, 129, 512, 513):
        if rows <= len(x):
            start = int(torch.randint(len(x) - rows + 1, ()))
            assert torch.equal(fixed.linear(x[start : start + rows], packed), whole[start : start + rows]), rows


@pytest.mark.parametrize("name", ["gate_up", "half_of_gate_up"])
def test_gated_rows_do_not_depend_on_the_batch(name: str, fixed: OpTable) -> None:
    torch.manual_seed(1)
    x, packed = cancelling(max(ROWS), *SHAPES[name])
    weight = packed.weight * 16  # gates of every slope
    whole = fixed.linear_silu_mul(x, PackedLinear(weight, None))
    for rows in (*ROWS, 16, 17, 32, 33, 128, 129):
        got = fixed.linear_silu_mul(x[-rows:], PackedLinear(weight, None))
        assert torch.equal(got, whole[-rows:]), rows


@pytest.mark.parametrize("name", SHAPES)
def test_every_choice_is_right(name: str, fast: OpTable, fixed: OpTable) -> None:
    torch.manual_seed(2)
    outputs, width = SHAPES[name]
    packed = PackedLinear((torch.randn(outputs, width, device="cuda") * width**-0.5).bfloat16(), None)
    for rows in (1, 2, 16, 17, 32, 64, 65, 128, 300):
        x = torch.randn(rows, width, device="cuda").bfloat16()
        exact = F.linear(x.float(), packed.weight.float())
        for table in (fast, fixed):
            close(table.linear(x, packed), exact)
            if name == "gate_up":
                gate, up = exact.chunk(2, -1)
                close(table.linear_silu_mul(x, packed), F.silu(gate) * up)


def close(got: Tensor, exact: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    assert (got - exact).norm() <= 5e-3 * exact.norm()

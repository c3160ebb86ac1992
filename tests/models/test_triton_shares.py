"""The columns of a matrix that a rank holds, multiplied by the kernels of GPUs."""

from __future__ import annotations

import pytest
import torch

from forkpoint.models.cuts import Cut
from forkpoint.models.quantization import WeightFormat
from forkpoint.models.weights import DummyWeights
from forkpoint.ops.linear.scaled import Matrix, dense
from forkpoint.ops.ranks import ALONE, Ranks
from tests.ops.triton_cases import DEVICE, relative_error, triton_ops

OURS = triton_ops()
ROWS, WIDTH, SIZE = 288, 512, 2
FORMATS = {
    "plain": None,
    "fp8": WeightFormat(on_load=True, plain=()),
    "integers": WeightFormat(scales=None, packing="gptq", group_size=32, plain=()),
    "groups of 24": WeightFormat(scales=None, packing="gptq", group_size=24, plain=()),
    "floats": WeightFormat(scales=None, packing="floats", plain=()),
}


def matrix_of(form: str, ranks: Ranks) -> Matrix:
    source = DummyWeights(dtype=torch.float32, seed=0, device=DEVICE, format=FORMATS[form], ranks=ranks)
    return source.get_matrix("down.weight", (ROWS, WIDTH // ranks.size), Cut(1))


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("form", FORMATS)
def test_products_of_ranks_add_up_to_the_whole(form: str, num_rows: int) -> None:
    x = torch.randn(num_rows, WIDTH, device=DEVICE)
    want = x.double() @ dense(matrix_of(form, ALONE)).double().T
    total = torch.zeros_like(want)
    for rank, own in enumerate(x.chunk(SIZE, dim=1)):
        packed = OURS.prepare_linear(matrix_of(form, Ranks(rank, SIZE)), None)
        total += OURS.linear(own, packed).double()
    assert relative_error(total, want) < 1e-4

"""States in bfloat16 on every backend: computed with as in fp32, and rounded once, where one is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forkpoint.ops.parameters import Recurrence, RecurrenceInputs
from forkpoint.ops.recurrence import reference
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from tests.ops.cpu_table import cpp
from tests.ops.recurrence_cases import padded_pool, recurrence_case, rows, segments
from tests.ops.triton_cases import DEVICE, ON_GPU, on_device, params_on_device, relative_error, triton_ops

SHAPES = {
    "gdn": Recurrence(1, 2, 16, 24),
    "mamba2": Recurrence(1, 2, 16, 16, delta=False),
    "kda": Recurrence(1, 1, 16, 16, per_key=True),
}


TABLES = {"torch": torch_table, "cpp": cpp, "triton": triton_ops}


@pytest.fixture(scope="module", params=TABLES)
def ops(request: pytest.FixtureRequest) -> OpTable:
    return TABLES[request.param]()


def compare(shape: Recurrence, run: Callable[[Tensor], Tensor]) -> None:
    """`run` on the same states in bfloat16 and in fp32: the same outputs, and slots that differ by the rounding.

    A GPU's threads share a tile by how wide its numbers are, and so add in another order.
    """
    torch.manual_seed(0)
    pool = padded_pool(8, (shape.num_v_heads, shape.value_dim, shape.key_dim)).bfloat16()
    kept = pool.to(DEVICE)
    wide = kept.float()
    outputs, want = run(kept), run(wide)
    assert torch.equal(outputs, want) if not ON_GPU else relative_error(outputs, want) <= 1e-6
    # Half a step where rounded; the interpreter cuts off instead.
    torch.testing.assert_close(kept.float(), wide, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_with_saves(ops: OpTable, name: str) -> None:
    case = recurrence_case(67, SHAPES[name])
    index = on_device(segments([64, 3], [1, -1], [2, 5], [[(64, 3)], [(2, 4)]]))
    mixed, a, b = (x.to(DEVICE) for x in (case.mixed, case.a, case.b))
    params = params_on_device(case.params)
    compare(SHAPES[name], lambda pool: ops.recurrence_prefill(RecurrenceInputs(mixed, a, b), params, pool, index))


@pytest.mark.parametrize("name", SHAPES)
def test_where_a_prompt_is_cut_changes_no_bit(ops: OpTable, name: str) -> None:
    if ON_GPU and ops.recurrence_prefill.__module__ == reference.__name__:
        pytest.skip("the library's products on a GPU have other bits for other numbers of rows")
    case, shape = recurrence_case(150, SHAPES[name]), SHAPES[name]
    mixed, a, b = (x.to(DEVICE) for x in (case.mixed, case.a, case.b))
    params = params_on_device(case.params)
    pool = padded_pool(4, (shape.num_v_heads, shape.value_dim, shape.key_dim)).bfloat16().to(DEVICE)

    def run(start: int, end: int, src: int, dst: int, *saves: tuple[int, int]) -> Tensor:
        index = on_device(segments([end - start], [src], [dst], [list(saves)]))
        return ops.recurrence_prefill(
            RecurrenceInputs(mixed[start:end], a[start:end], b[start:end]), params, pool, index
        )

    whole = run(0, 150, 0, 1, (64, 2))
    assert torch.equal(run(64, 128, 2, 2), whole[64:128])
    assert torch.equal(run(128, 150, 2, 3), whole[128:]) and torch.equal(pool[3], pool[1])


@pytest.mark.parametrize("name", SHAPES)
def test_decode_that_redirects(ops: OpTable, name: str) -> None:
    case = recurrence_case(3, SHAPES[name])
    index = on_device(rows([0, 1, -1], [0, 6, 7]))
    mixed, a, b = (x.to(DEVICE) for x in (case.mixed, case.a, case.b))
    params = params_on_device(case.params)
    compare(SHAPES[name], lambda pool: ops.recurrence_decode(RecurrenceInputs(mixed, a, b), params, pool, index))

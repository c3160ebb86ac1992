"""States that are written every few tokens: outputs and states are those of plain decoding."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import Recurrence
from forkpoint.ops.select import torch_table
from tests.ops.recurrence_cases import ints, padded_pool, recurrence_case
from tests.ops.triton_cases import DEVICE, ON_GPU, copy_pool, params_on_device, triton_ops

TORCH = torch_table()
TABLES = {"torch": (TORCH, torch.device("cpu")), "triton": (triton_ops(), DEVICE)}
INTERVAL = 4
FEW = [Recurrence(1, 2, 16, 8), Recurrence(1, 1, 24, 8, delta=False)]
MANY = [Recurrence(2, 4, 128, 128), Recurrence(2, 2, 96, 192, double_beta=True), Recurrence(1, 2, 64, 64, delta=False)]
CASES = [
    (name, shape, decay)
    for name in TABLES
    for shapes, decay in ((FEW, "slow"), (MANY, "slow"), (MANY, "strong"))
    for shape in shapes
    if ON_GPU or name == "torch" or shape in FEW  # the interpreter is slow
]


@pytest.mark.parametrize(("table", "shape", "decay"), CASES, ids=str)
def test_rows_go_on_as_by_plain_steps(table: str, shape: Recurrence, decay: str) -> None:
    """Row 0 begins with nothing, row 1 with a checkpoint of slot 0 at 5; both turn to other slots; row 2 is padding."""
    ops, device = TABLES[table]
    first, length, lines = (0, 5), 2 * INTERVAL + 3, (3, 1)
    cases = [recurrence_case(length, shape, decay, torch.bfloat16, seed=row) for row in range(2)]
    params = cases[0].params if table == "torch" else params_on_device(cases[0].params)
    start = padded_pool(6, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    pool, plain = (copy_pool(start) if device == DEVICE else start.clone() for _ in range(2))
    sizes = ((shape.num_v_heads, shape.value_dim), (shape.num_k_heads, shape.key_dim), (shape.num_v_heads,))
    records = [torch.full((4, INTERVAL, *size), torch.nan, device=device) for size in sizes]
    src, src_plain = [-1, 0, -1], [-1, 0, -1]
    for t in range(length):
        mixed, a, b = (
            torch.stack([getattr(case, name)[t] for case in (*cases, cases[0])]).to(device)
            for name in ("mixed", "a", "b")
        )
        at = [begin + t for begin in first]
        held = [min(t, position % INTERVAL) for position in at]
        folds = [int((position + 1) % INTERVAL == 0) for position in at]
        dst = [1 + t // 7 % 2, 3 + t // INTERVAL % 2, -1]  # one turns anywhere, one at boundaries of its own
        kept = RecordIndex(*(ints(column).to(device) for column in ([*lines, -1], [*held, 0], [*folds, 0])))
        index = DecodeIndex(ints(src).to(device), ints(dst).to(device))
        got = ops.recurrence_record(mixed, a, b, params, pool, index, kept, records)
        index = DecodeIndex(ints(src_plain).to(device), ints([1, 3, -1]).to(device))
        want = ops.recurrence_decode(mixed, a, b, params, plain, index)
        torch.testing.assert_close(got[:2], want[:2], rtol=2e-2, atol=2e-3)
        src, src_plain = dst, [1, 3, -1]
        for row, fold in enumerate(folds):
            if fold:
                torch.testing.assert_close(pool[dst[row]], plain[src_plain[row]], rtol=1e-4, atol=1e-4)
    assert torch.equal(pool[0].cpu(), start[0]) and torch.equal(pool[5].cpu(), start[5])
    assert not any(record[line].isfinite().any() for record in records for line in (0, 2))

"""The convolution and the first half of a recorded step in one launch, against one after the other."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.record_kernel import conv_record
from tests.ops.recurrence_cases import ints
from tests.ops.triton_cases import DEVICE, ON_GPU, triton_ops

OURS = triton_ops()
SHAPES = (
    [Recurrence(2, 4, 128, 128), Recurrence(1, 3, 96, 64, double_beta=True)]
    if ON_GPU
    else [Recurrence(1, 3, 24, 24), Recurrence(1, 2, 16, 8, delta=False)]
)


@pytest.mark.parametrize(("spec", "most"), [(SHAPES[0], 1), (SHAPES[0], 6), (SHAPES[1], 6)], ids=str)
def test_it_leaves_what_two_operators_leave(spec: Recurrence, most: int) -> None:
    """Windows and keys bit for bit; from one write of states to the next, with rows that move and a padded one. Where
    rows may have `most` tokens a step, a step of so many comes first, more than are recorded between two writes."""
    torch.manual_seed(0)
    rows, interval, width, heads = 4, 4, 4, spec.num_v_heads
    dtype = torch.bfloat16
    params = RecurrenceParams(spec, torch.rand(heads).to(DEVICE) * -3, torch.rand(heads).to(DEVICE) - 2)
    taps = torch.randn(width, spec.mixed_dim).to(DEVICE, dtype).t()
    shapes = ((heads, spec.value_dim), (spec.num_k_heads, spec.key_dim), (spec.num_k_heads,), (heads,))
    lines = [interval - 1 + (1 + (i > 0)) * most for i in range(len(shapes))]
    kept = [torch.full((rows, n, *s), torch.nan).to(DEVICE) for n, s in zip(lines, shapes, strict=True)]
    kept[1] = kept[1].to(dtype)
    given = [torch.randn(2 * rows, width - 1, spec.mixed_dim).to(DEVICE, dtype)]
    given += [torch.randn(2 * rows, heads, spec.value_dim, spec.key_dim).to(DEVICE), *kept]
    ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    before = most if most > 1 else 0
    if before:
        mixed, a, b = (torch.randn(3 * before, size).to(DEVICE, dtype) for size in (spec.mixed_dim, heads, heads))
        columns = [[-1, 1, 2, -1], [0, 1, 2, -1], [0, before, 2 * before, *[3 * before] * 2], [3, 1, 0, 2]]
        index = RecordIndex(interval, *(ints(column).to(DEVICE) for column in [*columns, *[[0] * 4] * 3, [-1] * 4]))
        for _, states, *records in (ours, theirs):
            OURS.recurrence_record(RecurrenceInputs(mixed, a, b), params, states, index, records)
    for t in range(interval + 2):
        mixed, a, b = (torch.randn(rows, size).to(DEVICE, dtype) for size in (spec.mixed_dim, heads, heads))
        slots = [[-1 if t == 0 else 0, 1, 2 if t < 5 else 6, -1], [0, 1, 2 if t < 4 else 6, -1]]
        src, dst = (ints(row).to(DEVICE) for row in slots)
        count = min(before + t, lines[0])
        written, held = [0, 0, t // interval * interval, 0], [count, count, t % interval, 0]
        marks = [0, 2 if t == 4 else 0, 0, 0], [-1, 5, -1, -1]
        columns = [[0, 1, 2, 3, 3], [3, 1, 0, 2], written, held, *marks]
        index = RecordIndex(interval, src, dst, *(ints(column).to(DEVICE) for column in columns))
        windows = DecodeIndex(src, dst)
        passed = OURS.conv_update(mixed, ConvTaps(taps, None, True), theirs[0], windows)
        want = OURS.recurrence_record(RecurrenceInputs(passed, a, b), params, theirs[1], index, theirs[2:])
        got = conv_record(
            RecurrenceInputs(mixed, a, b),
            ConvTaps(taps, None, True),
            ours[0],
            windows,
            params,
            ours[1],
            index,
            ours[2:],
        )
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
        for name, x, y in zip(("windows", "states", "updates", "keys", "scales", "decays"), ours, theirs, strict=True):
            if name in ("windows", "keys"):
                assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), name
            else:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)

"""States that are written every few tokens, with drafts and without: outputs and states are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.ops import launch
from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs
from forkpoint.ops.recurrence import heads_kernel, record_kernel
from forkpoint.ops.select import torch_table
from forkpoint.platforms.table import traits_of
from tests.ops.recurrence_cases import ints, padded_pool, recurrence_case
from tests.ops.triton_cases import DEVICE, ON_GPU, copy_pool, params_on_device, triton_ops

TORCH, CPU = torch_table(), torch.device("cpu")
TABLES = {"torch": (TORCH, CPU), "triton": (triton_ops(), DEVICE)}
INTERVAL = 4
MOST = 6  # tokens of a window: it may pass a checkpoint and the next write
FIRST = (0, 5, 8)  # where the rows begin: with nothing, in the middle, and whole
LENGTH = 41
SPARE = 2 * len(FIRST)  # for the states at marks
FEW = [Recurrence(1, 2, 16, 8), Recurrence(1, 1, 24, 8, delta=False)]
MANY = [Recurrence(2, 4, 128, 128), Recurrence(2, 2, 96, 192, double_beta=True), Recurrence(1, 2, 64, 64, delta=False)]
CASES = [
    (name, shape, decay)
    for name in TABLES
    for shapes, decay in ((FEW, "slow"), (MANY, "slow"), (MANY, "strong"))
    for shape in shapes
    if ON_GPU or name == "torch" or shape in FEW  # the interpreter is slow
]


class _Rows:
    """Rows that have slots `row` and `row + 3` in turns, drafts that are right or not, and then a padded one."""

    def __init__(self, most: int, interval: int, grid: int, device: torch.device) -> None:
        self.random, self.device = random.Random(most), device
        self.interval, self.grid = interval, grid
        self.at, self.written = list(FIRST), list(FIRST)
        self.slots = [-1, 1, 2]

    def index(self, sizes: list[int]) -> tuple[RecordIndex, dict[int, tuple[int, int]]]:
        """Return the index of a step with these tokens per row, and the (row, position) that each slot has to hold."""
        count = len(FIRST)
        due = [
            max(written, at // self.interval * self.interval) for at, written in zip(self.at, self.written, strict=True)
        ]
        fresh = [
            (row + count if slot == row else row) if slot < 0 or self.random.random() < 0.3 else slot
            for row, slot in enumerate(self.slots)
        ]
        mark, marked, found = [0] * count, [-1] * count, {}
        for row, (at, written) in enumerate(zip(self.at, self.written, strict=True)):
            boundary = (written // self.grid + 1) * self.grid
            if boundary <= at:  # the row leaves a checkpoint, in its old slot where it goes on in another
                marked[row] = self.slots[row] if boundary == at and self.slots[row] != fresh[row] else SPARE + row
                mark[row], found[marked[row]] = boundary - written, (row, boundary)
            if due[row] > written or self.slots[row] != fresh[row]:
                found[fresh[row]] = (row, due[row])
        held = [at - written for at, written in zip(self.at, self.written, strict=True)]
        starts = [sum(sizes[:row]) for row in range(count + 1)]
        columns = [self.slots, fresh, starts, [3, 1, 0], self.written, held, mark, marked]
        padded = [-1, -1, starts[-1], -1, 0, 0, 0, -1]
        tensors = (ints([*column, fill]).to(self.device) for column, fill in zip(columns, padded, strict=True))
        index = RecordIndex(self.interval, *tensors)
        self.slots, self.written = fresh, due
        return index, found


@pytest.mark.parametrize("most", [1, MOST])
@pytest.mark.parametrize(("table", "shape", "decay"), CASES, ids=str)
def test_rows_go_on_as_by_plain_steps(table: str, shape: Recurrence, decay: str, most: int) -> None:
    _run(table, shape, decay, most, INTERVAL)


@pytest.mark.parametrize("most", [4, 8, 9, 10])
@pytest.mark.parametrize("table", TABLES)
def test_rows_whose_drafts_all_count(table: str, most: int) -> None:
    """States are written every eight tokens, as usual on GPUs, so that windows come to one write or to two."""
    _run(table, FEW[0], "slow", most, 8, all_count=True)


@pytest.mark.parametrize("most", [0, heads_kernel.MOST_TOGETHER])
def test_gates_of_a_window_together_or_one_after_the_other(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three value heads of a key head, which are padded."""
    monkeypatch.setattr(heads_kernel, "MOST_TOGETHER", most)
    _run("triton", Recurrence(1, 3, 16, 8), "slow", 6, 8)


def test_a_device_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(traits_of(DEVICE), multiplies_tf32=False)
    for module in (record_kernel, heads_kernel):
        monkeypatch.setattr(module, "traits_of", lambda device: traits)
    _run("triton", FEW[0], "slow", 4, 8)


def _run(table: str, shape: Recurrence, decay: str, most: int, interval: int, all_count: bool = False) -> None:
    ops, device = TABLES[table]
    length = LENGTH if ON_GPU or table == "torch" else 3 * most if all_count else 14
    dtype = torch.float32 if shape.delta and most == 1 else torch.bfloat16
    cases = [recurrence_case(length, shape, decay, dtype, seed=row) for row in range(3)]
    params = cases[0].params if device == CPU else params_on_device(cases[0].params)
    start = padded_pool(3 * len(FIRST), (shape.num_v_heads, shape.value_dim, shape.key_dim))
    pool, plain = start.clone() if device == CPU else copy_pool(start), start.clone()
    outputs, states = [], [[plain[row] * (row > 0) for row in range(3)]]
    index = DecodeIndex(ints([-1, 1, 2]), ints([0, 1, 2]))
    for t in range(length):
        token = (torch.stack([getattr(case, name)[t] for case in cases]) for name in ("mixed", "a", "b"))
        outputs.append(TORCH.recurrence_decode(RecurrenceInputs(*token), cases[0].params, plain, index))
        states.append([plain[row].clone() for row in range(3)])
        index = DecodeIndex(ints([0, 1, 2]), ints([0, 1, 2]))
    lines = (interval + most - 1, interval + 2 * most - 1)
    shapes = ((shape.num_v_heads, shape.value_dim), (shape.num_k_heads, shape.key_dim))
    records = [
        torch.full((4, lines[i > 0], *size), torch.nan, dtype=dtype if i == 1 else torch.float32, device=device)
        for i, size in enumerate((*shapes, (shape.num_k_heads,), (shape.num_v_heads,)))
    ]
    run = _Rows(most, interval, 2 * interval, device)  # where states may become checkpoints

    def compare(found: dict[int, tuple[int, int]]) -> None:
        for slot, (row, position) in found.items():
            want = states[position - FIRST[row]][row]
            torch.testing.assert_close(pool[slot].cpu(), want, rtol=1e-4, atol=1e-4, msg=f"{slot}: {row}, {position}")

    def inputs(name: str, sizes: list[int], right: list[int]) -> Tensor:
        own = []
        for row, (size, count) in enumerate(zip(sizes, right, strict=True)):
            values = getattr(cases[row], name)[run.at[row] - FIRST[row] :][:size].clone()
            values[count:] = torch.randn_like(values[count:])
            own.append(values)
        return torch.cat([*own, torch.full_like(values[:1].expand(2, -1), torch.nan)]).to(device)  # and padding

    while max(done := [at - first for at, first in zip(run.at, FIRST, strict=True)]) < length:
        longest = [min(most, length - at) for at in done]
        sizes = longest if all_count else [run.random.randint(1, size) for size in longest]
        right = sizes if all_count else [run.random.randint(1, size) for size in sizes]
        kept, found = run.index(sizes)
        tokens = [inputs(name, sizes, right) for name in ("mixed", "a", "b")]
        got = ops.recurrence_record(RecurrenceInputs(*tokens), params, pool, kept, records).cpu()
        compare(found)
        for row, count in enumerate(right):
            want = torch.stack([outputs[done[row] + i][row] for i in range(count)])
            torch.testing.assert_close(got[sum(sizes[:row]) :][:count], want, rtol=2e-2, atol=2e-3)
        assert not got[sum(sizes) :].any(), "padding"
        run.at = [at + count for at, count in zip(run.at, right, strict=True)]
    for row, at in enumerate(run.at):  # they leave at a write
        run.at[row] = max(run.written[row], at // interval * interval)
    kept, found = run.index([0] * 3)
    ops.recurrence_flush(pool, kept, records)
    compare(found)
    assert not any(record[2].isfinite().any() for record in records), "a line of no row"


def test_rows_with_drafts_may_be_padded_to_as_many_as_there_are_tokens() -> None:
    """Graphs of steps that prefill pad rows like this."""
    shape, most, num_rows, found = FEW[0], 3, 8, []
    case = recurrence_case(num_rows, shape, "slow", torch.bfloat16)
    start = padded_pool(2, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    padding, sizes = num_rows - 2, ((shape.num_v_heads, shape.value_dim), (shape.num_k_heads, shape.key_dim))
    columns = [[0, 1, *[-1] * padding]] * 2 + [[0, 3, 6, *[6] * padding], [0, 1, *[-1] * padding]]
    columns += [[0] * num_rows] * 3 + [[-1] * num_rows]
    for ops, device in TABLES.values():
        index = RecordIndex(INTERVAL, *(ints(column).to(device) for column in columns))
        records = [
            torch.zeros((2, INTERVAL + (1 + (i > 0)) * most - 1, *size), dtype=dtype, device=device)
            for i, (size, dtype) in enumerate(
                zip(
                    (*sizes, sizes[1][:1], sizes[0][:1]),
                    (torch.float32, torch.bfloat16, *[torch.float32] * 2),
                    strict=True,
                )
            )
        ]
        params = case.params if device == CPU else params_on_device(case.params)
        inputs = RecurrenceInputs(*(getattr(case, name).to(device) for name in ("mixed", "a", "b")))
        pool = start.clone() if device == CPU else copy_pool(start)
        out = torch.full((num_rows, *sizes[0]), torch.nan, dtype=torch.bfloat16, device=device)
        found.append((ops.recurrence_record(inputs, params, pool, index, records, out).cpu(), records[0].cpu()))
    (want, updates), (got, own_updates) = found
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(own_updates, updates, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("table", TABLES)
def test_what_is_folded_keeps_the_bits_of_its_updates(table: str) -> None:
    """Eight records of each row at once, as if all were done in double precision."""
    (ops, device), shape, num_rows, interval = TABLES[table], Recurrence(1, 4, 64, 64), 8, 8
    heads, torch_seed = shape.num_v_heads, torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=torch_seed)

    pool, updates = normal(num_rows, heads, 64, 64), normal(num_rows, interval, heads, 64)
    keys, scales = normal(num_rows, interval + 1, 1, 64).bfloat16(), normal(num_rows, interval + 1, 1).abs()
    decays = -normal(num_rows, interval + 1, heads).abs() / 4
    since = decays[:, :interval].double().cumsum(1)
    share = (since[:, -1:] - since).exp() * scales[:, :interval].double()
    want = pool.double() * since[:, -1].exp()[..., None, None]
    want += torch.einsum("bth,bthv,btk->bhvk", share, updates.double(), keys[:, :interval, 0].double())
    rows, none = ints(list(range(num_rows))), ints([0] * num_rows)
    columns = (rows, rows, ints([0] * (num_rows + 1)), rows, none, none + interval, none, none - 1)
    index = RecordIndex(interval, *(column.to(device) for column in columns))
    pool = pool.to(device)
    ops.recurrence_flush(pool, index, [x.to(device) for x in (updates, keys, scales, decays)])
    torch.testing.assert_close(pool.cpu().double(), want, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("changes", [{}, {"masks_gathers": False}], ids=["", "straight"])
def test_a_draft_that_is_not_finite_counts_for_none_before_it(
    changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = replace(traits_of(DEVICE), **changes)
    monkeypatch.setattr(launch, "traits_of", lambda device: traits)
    ops, shape, size, most, interval = TABLES["triton"][0], Recurrence(1, 2, 64, 16), 3, 4, 8
    case, lines = recurrence_case(size, shape, dtype=torch.bfloat16), (interval + most - 1, interval + 2 * most - 1)
    for part in range(3):  # its query, its key, its value
        mixed = case.mixed.clone()
        mixed[-1, 64 * part : 64 * (part + 1)] = torch.nan
        shapes = ((2, 16), (1, 64), (1,), (2,))
        records = [torch.zeros(1, lines[i > 0], *own, device=DEVICE) for i, own in enumerate(shapes)]
        records[1] = records[1].bfloat16()
        index = RecordIndex(interval, *(ints(x).to(DEVICE) for x in ([0], [0], [0, size], *[[0]] * 4, [-1])))
        inputs = RecurrenceInputs(*(x.to(DEVICE) for x in (mixed, case.a, case.b)))
        params = params_on_device(case.params)
        out = ops.recurrence_record(inputs, params, torch.zeros(1, 2, 16, 64, device=DEVICE), index, records)
        assert out[:-1].isfinite().all() and not out[-1].isfinite().any()
        assert records[0][0, : size - 1].isfinite().all()


def test_a_row_of_no_tokens_leaves_nothing_behind_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the launch runs the convolution too, there are no gates after the last row's tokens."""
    spec, width, interval, found = Recurrence(1, 2, 16, 8), 4, 8, []
    plain = Tensor.new_empty

    def guarded(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = plain(self, *size, **options)
        if made.dim() != 3 or made.shape[-1] == spec.value_dim:
            return made
        found.append(torch.full((made.shape[0] + 1, *made.shape[1:]), 7.0, device=made.device))
        return found[-1][:-1]

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    sizes, lines = ((2, 8), (1, 16), (1,), (2,)), (interval, interval + 1)
    records = [torch.zeros(2, lines[i > 0], *own, device=DEVICE) for i, own in enumerate(sizes)]
    records[1] = records[1].bfloat16()
    case, params = recurrence_case(1, spec, dtype=torch.bfloat16), params_on_device(recurrence_case(1, spec).params)
    inputs = RecurrenceInputs(*(x.to(DEVICE) for x in (case.mixed, case.a, case.b)))
    src = ints([0, -1]).to(DEVICE)
    columns = (src, src, *(ints(x).to(DEVICE) for x in ([0, 1, 1], [0, 1], *[[0, 0]] * 3, [-1, -1])))
    taps = ConvTaps(torch.randn(spec.mixed_dim, width, device=DEVICE).bfloat16(), None, True)
    windows = torch.zeros(2, width - 1, spec.mixed_dim, device=DEVICE).bfloat16()
    pool = torch.zeros(2, 2, 8, 16, device=DEVICE)
    ops = TABLES["triton"][0]
    assert ops.conv_record is not None
    ops.conv_record(
        inputs, taps, windows, DecodeIndex(src, src), params, pool, RecordIndex(interval, *columns), records
    )
    assert found and all((gates[-1] == 7).all() for gates in found)

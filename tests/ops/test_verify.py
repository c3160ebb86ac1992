"""Rows with drafts: outputs, folded states and those saved inside a window have the bits of as many plain decodes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forkpoint.ops.metadata import DecodeIndex, VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, ScanInputs, ScanParams
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.recurrence_cases import ints, padded_pool, recurrence_case
from tests.ops.triton_cases import DEVICE, IS_INTERPRETED, ON_GPU, behind, copy_pool, params_on_device, triton_ops

TABLES = {"torch": torch_table, "cpp": cpp, "triton": triton_ops}  # where one is missing its cases alone are skipped
DEVICES = {"torch": torch.device("cpu"), "cpp": torch.device("cpu"), "triton": DEVICE}
GRID = 8  # a "block boundary" every 8 tokens
MOST = 5  # tokens of a window
LENGTHS = {"torch": 41, "cpp": 41, "triton": 41 if ON_GPU else 10}  # tokens of each row
NUM_ROWS = 3
MANY, FEW_AT_ONCE, REPEATS = (256, 8, 1000) if ON_GPU else (4, 2, 2)
SHAPES = [
    Recurrence(1, 2, 128, 32),
    Recurrence(2, 4, 64, 20),
    Recurrence(2, 2, 96, 192, double_beta=True),
    Recurrence(1, 3, 24, 40),
    Recurrence(1, 2, 16, 16, delta=False),
    Recurrence(2, 2, 128, 128, per_key=True),
    Recurrence(2, 2, 24, 20, double_beta=True, per_key=True, bound=-5.0),
]
FEW = [
    Recurrence(1, 2, 128, 8),
    Recurrence(1, 1, 24, 8),
    Recurrence(1, 1, 24, 8, delta=False),
    Recurrence(1, 1, 24, 8, per_key=True, bound=-5.0),
]
CASES = [
    (table, shape) for table in TABLES for shape in (FEW if table == "triton" and not ON_GPU else SHAPES)
]  # the interpreter is slow


class _Rows:
    """Three rows in slots 1 to 3 (and, turn by turn, 4 to 6); 0 is for what a mark saves. Row 0 begins with nothing."""

    def __init__(self, seed: int, length: int, device: torch.device) -> None:
        self.random, self.length, self.device = random.Random(seed), length, device
        self.done, self.pending = [0] * NUM_ROWS, [0] * NUM_ROWS
        self.slots, self.lines = [-1, 2, 3], [0, 2, 4]

    @property
    def next_lines(self) -> list[int]:
        return [line ^ 1 for line in self.lines]

    @property
    def at(self) -> list[int]:
        return [done + pending for done, pending in zip(self.done, self.pending, strict=True)]

    def plan(self) -> tuple[VerifyIndex, list[list[int]], dict[int, tuple[int, int]]]:
        """The index of a step, each row's positions in its tokens (those not accepted are -1), and what
        is to be found in which slot: (row, position)."""
        draw = self.random
        sizes = [draw.randint(1, min(MOST, self.length - at)) for at in self.at]
        accepted = [draw.randint(1, size) for size in sizes]
        fresh = [(4 + row if slot == 1 + row else 1 + row) if draw.random() < 0.4 or slot < 0 else slot
                 for row, slot in enumerate(self.slots)]  # fmt: skip
        found, mark, mark_slot = {}, [0] * NUM_ROWS, [-1] * NUM_ROWS
        for row, (done, at) in enumerate(zip(self.done, self.at, strict=True)):
            boundary = (done // GRID + 1) * GRID
            if self.slots[row] != fresh[row] and self.slots[row] >= 0 and self.pending[row]:
                mark[row], mark_slot[row] = self.pending[row], self.slots[row]
                found[self.slots[row]] = (row, at)
            elif boundary <= at and 0 not in found:
                mark[row], mark_slot[row], found[0] = boundary - done, 0, (row, boundary)
            found[fresh[row]] = (row, at + 1 if sizes[row] == 1 else at)
        positions = [
            [at + t if t < count else -1 for t in range(size)]
            for at, count, size in zip(self.at, accepted, sizes, strict=True)
        ]
        starts = [sum(sizes[:row]) for row in range(NUM_ROWS + 1)]
        columns = (
            self.slots,
            fresh,
            starts,
            self.pending,
            mark,
            mark_slot,
            self.lines,
            self.next_lines,
            range(NUM_ROWS),
        )
        index = VerifyIndex(*(ints(list(column)).to(self.device) for column in columns))
        self.done = [at + (size == 1) for at, size in zip(self.at, sizes, strict=True)]
        self.pending = [count if size > 1 else 0 for count, size in zip(accepted, sizes, strict=True)]
        self.slots, self.lines = fresh, self.next_lines
        return index, positions, found

    def fold(self) -> VerifyIndex:
        """What is pending, in place, without tokens."""
        none = [0] * NUM_ROWS
        columns = (
            self.slots,
            self.slots,
            [0] * (NUM_ROWS + 1),
            self.pending,
            none,
            none,
            self.lines,
            self.lines,
            range(NUM_ROWS),
        )
        return VerifyIndex(*(ints(list(column)).to(self.device) for column in columns))


def _inputs(values: Tensor, positions: Sequence[Sequence[int]]) -> Tensor:
    """The rows' tokens `[T, ...]` out of `values[rows, length, ...]`; those that are not accepted are made up."""
    return torch.stack([
        values[row, position] if position >= 0 else torch.randn_like(values[0, 0], dtype=torch.float32).to(values.dtype)
        for row, own in enumerate(positions) for position in own
    ])  # fmt: skip


def _anywhere(x: Tensor) -> Tensor:
    """`x[T, D]` in rows that begin at no round address."""
    return x.new_empty(len(x), x.shape[1] + 6)[:, 3:-3].copy_(x)


def _on(device: torch.device, pool: Tensor) -> Tensor:
    """A copy of a pool with the same gaps."""
    return copy_pool(pool) if device == DEVICE else pool.clone()


def _check(
    run: _Rows,
    pool: Tensor,
    decode: Callable[[int, Tensor, DecodeIndex], Tensor],
    verify: Callable[[list[list[int]], VerifyIndex], Tensor],
    fold: Callable[[VerifyIndex], None],
) -> None:
    """`decode(t, pool, index)` is token `t` of all rows, `verify(positions, index)` a step, `fold` what is pending; the
    latter two work in `pool`."""
    plain, states = _on(run.device, pool), [[pool[max(slot, 0)] * (slot >= 0) for slot in (-1, 2, 3)]]
    plain[1] = 0
    outputs, index = [], DecodeIndex(ints([1, 2, 3]).to(run.device), ints([1, 2, 3]).to(run.device))
    for t in range(run.length):
        outputs.append(decode(t, plain, index))
        states.append([plain[slot].clone() for slot in (1, 2, 3)])
    while min(run.at) < run.length - 1 and max(run.at) < run.length:
        step, positions, found = run.plan()
        out = verify(positions, step)
        flat = [(row, position) for row, own in enumerate(positions) for position in own]
        for i, (row, position) in enumerate(flat):
            assert position < 0 or torch.equal(out[i], outputs[position][row])
        for slot, (row, position) in found.items():
            assert torch.equal(pool[slot], states[position][row]), f"slot {slot}: row {row} after {position} tokens"
    fold(run.fold())
    for row, (slot, position) in enumerate(zip(run.slots, run.at, strict=True)):
        assert torch.equal(pool[slot], states[position][row])


def _records(device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((2 * NUM_ROWS, MOST, *shape), torch.nan, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("table", "shape"), CASES, ids=str)
def test_recurrence(table: str, shape: Recurrence, dtype: torch.dtype) -> None:
    ops, device, length = TABLES[table](), DEVICES[table], LENGTHS[table]
    cases = [recurrence_case(length, shape, dtype=torch.bfloat16, seed=row) for row in range(NUM_ROWS)]
    params = cases[0].params if table != "triton" else params_on_device(cases[0].params)
    given = [torch.stack([getattr(case, name) for case in cases]).to(device) for name in ("mixed", "a", "b")]
    keys = (shape.num_k_heads, shape.key_dim)
    sizes = (shape.num_v_heads, shape.value_dim, shape.key_dim)
    pool = _on(device, padded_pool(7, sizes, dtype))
    records = _records(device, sizes[:2], keys, keys if shape.per_key else sizes[:1])
    _check(
        _Rows(len(table), length, device),
        pool,
        lambda t, plain, index: ops.recurrence_decode(
            RecurrenceInputs(*(_anywhere(value[:, t]) for value in given)), params, plain, index
        ),
        lambda at, index: ops.recurrence_verify(
            RecurrenceInputs(*(_inputs(value, at) for value in given)), params, pool, index, records
        ),
        lambda index: ops.recurrence_fold(pool, index, records),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("table", "values"), [("torch", 12), ("cpp", 12), ("cpp", 16), ("triton", 16)])
def test_scan(table: str, values: int, dtype: torch.dtype) -> None:
    torch.manual_seed(values)
    ops, device, length, dim = TABLES[table](), DEVICES[table], LENGTHS[table], 72
    wide, narrow = torch.randn(3, NUM_ROWS, length, dim), torch.randn(2, NUM_ROWS, length, values)
    x, dt, z, b, c = (value.bfloat16().to(device) for value in (*wide, *narrow))
    given = (x, dt, b, c, z)
    constants = (-torch.rand(dim, values), torch.randn(dim), torch.randn(dim))
    params = ScanParams(*(value.to(device) for value in constants))
    pool, records = (
        _on(device, padded_pool(7, (dim, values), dtype)),
        _records(device, (dim,), (dim,), (values,), dtype=x.dtype),
    )
    _check(
        _Rows(values, length, device),
        pool,
        lambda t, plain, index: ops.scan_decode(ScanInputs(*(value[:, t] for value in given)), params, plain, index),
        lambda at, index: ops.scan_verify(
            ScanInputs(*(_inputs(value, at) for value in given)), params, pool, index, records
        ),
        lambda index: ops.scan_fold(pool, index, [*records, params.A, params.dt_bias]),
    )


@pytest.mark.parametrize("width", [2, 4, 10])
@pytest.mark.parametrize("table", TABLES)
def test_convolution(table: str, width: int) -> None:
    torch.manual_seed(0)
    ops, device, length, dim = TABLES[table](), DEVICES[table], LENGTHS[table], 40
    x = torch.randn(NUM_ROWS, length, dim).bfloat16().to(device)
    weight, bias = torch.randn(dim, width).bfloat16().to(device), torch.randn(dim).bfloat16().to(device)
    pool = _on(device, padded_pool(7, (width - 1, dim), torch.bfloat16))
    records = _records(device, (dim,), dtype=torch.bfloat16)
    _check(
        _Rows(width, length, device),
        pool,
        lambda t, plain, index: ops.conv_update(x[:, t], ConvTaps(weight, bias, True), plain, index),
        lambda at, index: ops.conv_verify(_inputs(x, at), ConvTaps(weight, bias, True), pool, index, records),
        lambda index: ops.conv_fold(pool, index, records),
    )


@pytest.mark.parametrize("table", TABLES)
def test_windows(table: str) -> None:
    torch.manual_seed(0)
    ops, device, length, dim = TABLES[table](), DEVICES[table], LENGTHS[table], 24
    x = torch.randn(NUM_ROWS, length, dim).bfloat16().to(device)
    pool, records = _on(device, padded_pool(7, (2, dim), torch.bfloat16)), _records(device, (dim,), dtype=x.dtype)
    _check(
        _Rows(3, length, device),
        pool,
        lambda t, plain, index: ops.window_update(x[:, t], plain, index),
        lambda at, index: ops.window_verify(_inputs(x, at), pool, index, records),
        lambda index: ops.conv_fold(pool, index, records),
    )


@pytest.mark.parametrize("table", ["torch", "cpp"])
def test_a_mark_that_drafts_did_not_come_to_reads_nothing(table: str) -> None:
    """The mark of an optimistic row may lie beyond the pending tokens, and beyond all records."""
    pool, x, records = torch.randn(3, 3, 8), torch.randn(1, 8), torch.randn(2, 5, 8)
    before, columns = pool[2].clone(), ([0], [0], [0, 1], [1], [4], [2], [0], [1], [0])
    index = VerifyIndex(*map(ints, columns))
    TABLES[table]().conv_verify(x, ConvTaps(torch.randn(8, 4), None, True), pool, index, [records])
    assert torch.equal(pool[2], before)


def test_programs_of_a_row_do_not_meet_in_its_records() -> None:
    """Some read a row's records while others write those of its new tokens, in another line. More rows than a device
    has room for at once have the bits of few rows at a time, as often as they are asked."""
    shape = Recurrence(16, 32, 128, 128) if ON_GPU else Recurrence(1, 2, 16, 8)
    ops, size, case = TABLES["triton"](), MOST - 1, recurrence_case((MOST - 1) * MANY, shape, dtype=torch.bfloat16)
    given, params = (case.mixed, case.a, case.b), params_on_device(case.params)
    keys, values = (shape.num_k_heads, shape.key_dim), (shape.num_v_heads, shape.value_dim)
    state = torch.randn(MANY, *values, shape.key_dim, device=DEVICE)
    recorded = [torch.randn(2 * MANY, size, *own, device=DEVICE) for own in (values, keys, values[:1])]

    def run(first: int, end: int, pool: Tensor, records: list[Tensor]) -> Tensor:
        rows, count = torch.arange(first, end, dtype=torch.int32, device=DEVICE), end - first
        starts = torch.arange(0, size * count + 1, size, dtype=torch.int32, device=DEVICE)
        none, all_of_them = torch.zeros_like(rows), torch.full_like(rows, size)
        index = VerifyIndex(rows, rows, starts, all_of_them, none, none - 1, 2 * rows, 2 * rows + 1, rows)
        tokens = (x[first * size : end * size].to(DEVICE) for x in given)
        return ops.recurrence_verify(RecurrenceInputs(*tokens), params, pool, index, records)

    pool, records = state.clone(), [x.clone() for x in recorded]
    parts = [run(first, first + FEW_AT_ONCE, pool, records) for first in range(0, MANY, FEW_AT_ONCE)]
    expected = [torch.cat(parts), pool, *records]
    assert not torch.equal(pool, state)
    for _ in range(REPEATS):
        pool, records = state.clone(), [x.clone() for x in recorded]
        found = [run(0, MANY, pool, records), pool, *records]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_tokens_that_pad_a_recorded_step_become_zeros() -> None:
    """One row of two tokens, one that is padding, and three tokens of no row, whose inputs are not finite."""
    ops, shape, columns = triton_ops(), Recurrence(1, 1, 16, 8), ([1, -1], [1, -1], [0, 2, 2])
    index = VerifyIndex(*(ints(values).to(DEVICE) for values in (*columns, *[[0, 0]] * 3, [0, 0], [1, 0], [0, 0])))
    case = recurrence_case(5, shape)
    mixed, a, b = (behind(x[:2].to(DEVICE), 3) for x in (case.mixed, case.a, case.b))
    pool = torch.zeros(2, 1, 8, 16, device=DEVICE)
    records = [torch.zeros(2, 2, 1, dim, device=DEVICE) for dim in (8, 16)] + [torch.zeros(2, 2, 1, device=DEVICE)]
    given, out = params_on_device(case.params), torch.full((5, 1, 8), torch.nan, dtype=mixed.dtype, device=DEVICE)
    assert ops.recurrence_verify(RecurrenceInputs(mixed, a, b), given, pool, index, records, out) is out
    assert out[:2].all() and not out[2:].any()
    wide, lines = [behind(torch.ones(2, 40, device=DEVICE), 3)] * 5, [torch.zeros(2, 2, 40, device=DEVICE)] * 3
    scan = ScanParams(-torch.ones(40, 40, device=DEVICE), *torch.ones(2, 40, device=DEVICE))
    out = ops.scan_verify(ScanInputs(*wide), scan, torch.zeros(2, 40, 40, device=DEVICE), index, lines)
    assert out[:2].all() and not out[2:].any()
    lines = [torch.zeros(2, 2, 40, device=DEVICE)]
    weight, window = torch.ones(40, 4, device=DEVICE), torch.zeros(2, 3, 40, device=DEVICE)
    out = ops.conv_verify(
        behind(torch.ones(2, 40, device=DEVICE), 3), ConvTaps(weight, None, True), window, index, lines
    )
    assert out[:2].all() and not out[2:].any()


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="the tests run what this device's compiler makes")
def test_compiled_for_a_gpu_rows_with_drafts_have_the_bits_of_plain_decodes() -> None:
    """The compiler chooses in each kernel which product is fused with which sum. The interpreter fuses none.

    Compiled too are the shortlist's conversions of four bytes at a time.
    """
    cases = "triton and (recurrence or scan or convolution) and not dtype1"  # whose states hide last bits
    files = [__file__, str(Path(__file__).with_name("test_triton_shortlist.py"))]
    command = [sys.executable, "-m", "pytest", "-p", "tests.ops.on_ptx", *files]
    command += ["-k", f"test_verify and {cases} or both_halves"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout + done.stderr


def test_what_the_assembler_may_fuse_or_not_is_refused() -> None:
    from tests.ops.ptx import check_sums

    product, copied = ("mul.f32", ["%r1", "%r2", "%r3"]), ("mov.b32", ["%r4", "%r1"])
    check_sums([product, copied, ("add.f32", ["%r5", "%r2", "%r6"]), ("fma.rn.f32", ["%r5", "%r2", "%r6", "%r4"])])
    for copying in ("mov.b32", "neg.f32", "abs.f32"):
        with pytest.raises(AssertionError, match="may round"):
            check_sums([product, (copying, ["%r4", "%r1"]), ("sub.f32", ["%r5", "%r6", "%r4"])])

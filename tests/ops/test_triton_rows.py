"""The bookkeeping of a step's rows: the same integers as by torch, in the same places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.ops.rows import host_rows, host_rows_kernel, kernel, reference
from forkpoint.ops.rows.columns import IdColumns, OptimisticColumns, SpanColumns
from tests.ops.triton_cases import DEVICE

ROWS, MOST, ENTRIES = 6, 3, 8
LAST_SAMPLED, TO_DRAFT, NO_DRAFT = -1, -2, -3


def longs(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype)


def copied(given: Any) -> Any:
    """On the device."""
    if isinstance(given, tuple):
        values = map(copied, given)
        return type(given)(*values) if hasattr(given, "_fields") else tuple(values)
    return given.to(DEVICE, copy=True) if isinstance(given, Tensor) else given


def told(columns: Any) -> list[Any]:
    return [value.tolist() if isinstance(value, Tensor) else value for value in columns]


def step(
    rng: np.random.Generator, drafts: bool, has_kv: bool, most: int, padding: int
) -> tuple[IdColumns, OptimisticColumns]:
    """Some rows, with drafts or without, optimistic or not, and `padding` tokens behind them; a prompt's behind."""
    row = rng.permutation(ROWS)[:4]
    sizes = rng.integers(1, 2 + MOST, len(row)) if most == 1 else np.ones(4, int)
    owner, count = np.repeat(row, sizes), int(sizes.sum())
    ids = rng.integers(0, 99, count + padding + 5)
    ids[:count] = np.where(rng.random(count) < 0.4, LAST_SAMPLED, ids[:count])
    at = np.full(count + padding, -1)
    if drafts:
        own = rng.random(count) < 0.5
        ids[:count][own], at[:count][own] = TO_DRAFT, owner[own] * MOST + rng.integers(0, MOST, int(own.sum()))
    ahead = np.where(rng.random(ROWS) < 0.6, np.arange(ROWS), ROWS)
    num_rejected = longs([*rng.integers(0, 4, ROWS), 0])
    positions = rng.integers(4, 14, (most, count + padding))
    slots = np.where(rng.random(positions.shape) < 0.3, -1, positions)
    slots[:, count:], positions[:, count:] = -1, 0
    columns = IdColumns(
        longs(ids),
        longs([*owner, *[ROWS] * padding]),
        longs(rng.integers(0, 99, ROWS + 1)),
        longs(rng.integers(0, 99, (ROWS + 1, MOST))) if drafts else None,
        longs(at) if drafts else None,
    )
    optimistic = OptimisticColumns(
        num_rejected,
        longs([*ahead[owner], *[ROWS] * padding]),
        longs(positions),
        longs(positions + (positions > 0), torch.int32),
        longs(slots) if has_kv else None,
        longs([*owner, *[0] * padding], torch.int32),
        longs(rng.integers(0, 50, (ROWS, ENTRIES)), torch.int32),
        2,
        longs([*ahead[row], *[ROWS] * min(padding, 1)]),
        longs(rng.integers(0, 9, 4 + min(padding, 1)), torch.int32),
        longs(rng.integers(0, 9, 4 + min(padding, 1)), torch.int32) if drafts else None,
    )
    return columns, optimistic


@pytest.mark.parametrize(
    ("drafts", "has_kv", "most", "padding"),
    [(True, True, 1, 3), (False, False, 1, 0), (True, True, 1, 140), (False, True, MOST, 2)],
)
def test_catching_up(drafts: bool, has_kv: bool, most: int, padding: int) -> None:
    """Also of the layer that drafts, for several tokens of each row."""
    rng = np.random.default_rng(padding)
    for is_optimistic in (True, False):
        ids, optimistic = step(rng, drafts, has_kv, most, padding)
        given = copied(ids), copied(optimistic if is_optimistic else None)
        before = told(ids)
        reference.catch_up(ids, optimistic if is_optimistic else None)
        kernel.catch_up(*given)
        assert told(given[0]) == told(ids) != before
        if given[1] is not None:
            assert told(given[1]) == told(optimistic)
        assert (ids.ids[: len(ids.rows) - padding] >= 0).all()


@pytest.mark.parametrize("width", [40, 1030])
def test_newest_hidden_states(width: int) -> None:
    """Rows with and without pending tokens match the reference bit for bit. Windows are not contiguous."""
    pool, records = torch.randn(5, 2, width + 8)[:, -1, :width].bfloat16(), torch.randn(4, MOST, width).bfloat16()
    given = (pool, records, longs([4, 0, 2]), longs([1, 3, 0]), longs([0, 3, 1]))
    want = reference.newest(*given)
    assert torch.equal(want, torch.stack([pool[4], records[3, 2], records[0, 0]]))
    assert torch.equal(kernel.newest(*(each.to(DEVICE) for each in given)).cpu(), want)


def spans(rng: np.random.Generator, drafts: bool) -> tuple[Any, ...]:
    """Rows of 1 to 1 + MOST positions, with drafts that are right up to any of them, by host and by device, and ids
    that are none."""
    rows = rng.permutation(ROWS)[:5]
    sizes = np.array([1 + MOST, *rng.integers(1, 2 + MOST, 4)])
    ends = np.cumsum(sizes)
    found = rng.integers(0, 99, ends[-1])
    guesses = np.where(rng.random(len(found)) < 0.7, found, found + 1)
    guesses[ends - 1] = NO_DRAFT
    drafted = rng.integers(0, 99, (ROWS + 1, MOST))
    at = np.repeat(rows, sizes) * MOST + np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    at = np.where((rng.random(len(found)) < 0.5) & (guesses != NO_DRAFT), at, -1)
    if drafts:
        drafted.flat[at[at >= 0]] = guesses[at >= 0]
        guesses[at >= 0] = TO_DRAFT
    columns = (longs(guesses), longs(rows), longs(ends - sizes), longs(sizes), longs(rng.integers(0, 99, ROWS + 1)))
    by_device = (longs(drafted), longs(at)) if drafts else (None, None)
    finite = torch.from_numpy(rng.random(len(found)) < 0.9)
    return longs(found), finite, SpanColumns(*columns, longs([5] * ROWS + [0]), *by_device, int(sizes.max()))


@pytest.mark.parametrize("drafts", [True, False])
def test_accepting(drafts: bool) -> None:
    rng, counts = np.random.default_rng(1), set()
    for _ in range(5):
        given = spans(rng, drafts)
        there = copied(given)
        found, want = kernel.accept(*there), reference.accept(*given)
        assert found.tolist() == want.tolist()
        assert told(there[2]) == told(given[2])
        counts |= set(want[len(given[0]) :].tolist())
        assert int(given[2].num_rejected.max()) <= 5 and int(given[2].last_sampled.min()) >= 0
    assert counts == set(range(1, 2 + MOST))


@pytest.mark.parametrize("module", [host_rows, host_rows_kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_tables_in_the_memory_of_the_host(module: Any, dtype: torch.dtype) -> None:
    """Tables of one row, of several, and the last id of all."""
    whole = torch.randn(9, 20).to(dtype)
    ids = torch.tensor([[0, 8, 1], [5, 6, 1]]).to(DEVICE)
    for counts in ([9], [1, 5, 3]):
        prepared = module.prepare_host_rows(iter(whole.split(counts)), DEVICE)
        assert torch.equal(module.host_rows(prepared, ids).cpu(), whole[ids.cpu()])

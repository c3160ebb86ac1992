"""The bookkeeping of a step's rows: the same integers as by torch, in the same places."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.ops.rows import kernel, reference
from forkpoint.ops.rows.columns import IdColumns, LateColumns
from tests.ops.triton_cases import DEVICE

ROWS, MOST, ENTRIES = 6, 3, 8
LAST_SAMPLED, TO_DRAFT, NO_DRAFT = -1, -2, -3


def longs(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype)


def copied(columns: Any) -> Any:
    """On the device."""

    def copy(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(copy, value))
        return value.to(DEVICE, copy=True) if isinstance(value, Tensor) else value

    return (
        None
        if columns is None
        else replace(columns, **{f.name: copy(getattr(columns, f.name)) for f in fields(columns)})
    )


def tensors(columns: Any) -> list[list[int]]:
    """All that columns hold."""
    values = [getattr(columns, field.name) for field in fields(columns)]
    return [each.tolist() for value in values for each in (value if isinstance(value, tuple) else (value,))
            if isinstance(each, Tensor)]  # fmt: skip


def step(
    rng: np.random.Generator, drafts: bool, has_kv: bool, most: int, padding: int
) -> tuple[IdColumns, LateColumns]:
    """Some rows, with drafts or without, planned ahead or not, and `padding` tokens behind them; a prompt's behind."""
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
    missed = longs([*rng.integers(0, 4, ROWS), 0])
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
    late = LateColumns(
        missed,
        longs([*ahead[owner], *[ROWS] * padding]),
        longs(positions),
        longs(positions + (positions > 0), torch.int32),
        longs(slots) if has_kv else None,
        longs([*owner, *[0] * padding], torch.int32),
        longs(rng.integers(0, 50, (ROWS, ENTRIES)), torch.int32),
        2,
        longs([*ahead[row], *[ROWS] * min(padding, 1)]),
        tuple(longs(rng.integers(0, 9, 4 + min(padding, 1)), torch.int32) for _ in range(1 + drafts)),
        most > 1,
    )
    return columns, late


@pytest.mark.parametrize(
    ("drafts", "has_kv", "most", "padding"),
    [(True, True, 1, 3), (False, False, 1, 0), (True, True, 1, 140), (False, True, MOST, 2)],
)
def test_catching_up(drafts: bool, has_kv: bool, most: int, padding: int) -> None:
    """Also of the layer that drafts, whose keys lie a token further, for several tokens of each row."""
    rng = np.random.default_rng(padding)
    for is_late in (True, False):
        ids, late = step(rng, drafts, has_kv, most, padding)
        given = copied(ids), copied(late if is_late else None)
        before = tensors(ids)
        reference.catch_up(ids, late if is_late else None)
        kernel.catch_up(*given)
        assert tensors(given[0]) == tensors(ids) != before
        if given[1] is not None:
            assert tensors(given[1]) == tensors(late)
        assert (ids.ids[: len(ids.rows) - padding] >= 0).all()


@pytest.mark.parametrize("width", [40, 1030])
def test_newest_hidden_states(width: int) -> None:
    """Of rows with pending tokens and without, bit for bit; windows lie apart."""
    pool, records = torch.randn(5, 2, width + 8)[:, -1, :width].bfloat16(), torch.randn(4, MOST, width).bfloat16()
    given = (pool, records, longs([4, 0, 2]), longs([1, 3, 0]), longs([0, 3, 1]))
    want = reference.newest(*given)
    assert torch.equal(want, torch.stack([pool[4], records[3, 2], records[0, 0]]))
    assert torch.equal(kernel.newest(*(each.to(DEVICE) for each in given)).cpu(), want)

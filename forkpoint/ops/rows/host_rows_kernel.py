"""Rows of tables in the host's memory, in Triton. The device reads them where they are, so a graph can record it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, overlap
from forkpoint.ops.rounding import next_power_of_2
from forkpoint.platforms.table import resolve_platform

PAGE_BYTES = 4096  # of the host; pinned memory has whole pages of its own


@triton.jit
def _rows_kernel(
    ids,
    addresses,
    first,
    out,
    num_tables,
    D: tl.constexpr,
    TABLES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copy the row of one id."""
    await_inputs(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    number, table = tl.load(ids + pid), tl.arange(0, TABLES)
    starts = tl.load(first + table, mask=table < num_tables, other=0)
    place = tl.sum(((starts <= number) & (table < num_tables)).to(tl.int32), axis=0) - 1
    rows = tl.load(addresses + place).to(tl.pointer_type(out.dtype.element_ty))
    at = tl.arange(0, triton.next_power_of_2(D))
    value = tl.load(rows + (number - tl.load(first + place)) * D + at, mask=at < D, other=0.0)
    tl.store(out + pid * D + at, value, mask=at < D)


class PinnedRows:
    """Tables `[N_i, D]` in pinned memory of the host, which `device` reads. Their rows follow each other."""

    def __init__(self, tables: Iterable[Tensor], device: torch.device) -> None:
        platform, self._kept, counts = resolve_platform(str(device)), list[Tensor](), list[int]()
        for table in tables:  # one at a time, because all of them may fill half of the host's memory
            memory = _whole_pages(table.nbytes)
            kept = memory[: table.nbytes].view(table.dtype).view(table.shape).copy_(table)
            platform.pin(memory)
            weakref.finalize(self, platform.unpin, memory)
            self._kept.append(kept)
            counts.append(len(kept))
        self.dim, self.dtype = self._kept[0].shape[1], self._kept[0].dtype
        self.addresses = torch.tensor([kept.data_ptr() for kept in self._kept], device=device)
        self.first = torch.tensor([0, *accumulate(counts)][:-1], device=device)


def _whole_pages(num_bytes: int) -> Tensor:
    """Return uninitialised memory of the host that no other tensor shares a page with."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = torch.from_numpy(np.empty(size + PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + size]


def prepare_host_rows(tables: Iterable[Tensor], device: torch.device) -> PinnedRows:
    """Copy the tables into pinned memory of the host."""
    return PinnedRows(tables, device)


def host_rows(rows: PinnedRows, ids: Tensor) -> Tensor:
    """Return the rows `[T, S, D]` of `ids[T, S]` int64 (`OpTable.host_rows`)."""
    ids, count = ids.contiguous(), ids.numel()
    out = torch.empty(*ids.shape, rows.dim, dtype=rows.dtype, device=ids.device)
    tables = len(rows.first)
    if count:
        sizes = {"D": rows.dim, "TABLES": next_power_of_2(tables), **overlap(ids.device, len(ids))}
        _rows_kernel[(count,)](ids, rows.addresses, rows.first, out, tables, **sizes, num_warps=1)
    return out

"""The bookkeeping of a step's rows in Triton, one launch per operator. columns.py describes the arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.json_options import MAX_DRAFTS
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.rows.columns import NOT_FINITE, IdColumns, OptimisticColumns, SpanColumns

TILE = tl.constexpr(128)  # tokens per program
WIDTH = tl.constexpr(1024)  # values per program of `newest`
MOST = tl.constexpr(next_power_of_2(1 + MAX_DRAFTS))  # positions of a row, padded to a power of two
COLUMNS = ("token_ids", "finite", "drafts", "rows", "starts", "sizes", "draft_at")
FAILED = tl.constexpr(NOT_FINITE)


@triton.jit
def _take_back(counts, at, inside, num_rejected):
    tl.store(counts + at, tl.load(counts + at, mask=inside, other=0) - num_rejected, mask=inside)


@triton.jit(do_not_specialize=["num_ids", "num_tokens", "num_records", "table_stride"])
def _catch_up_kernel(
    ids, rows, last_sampled, drafted, draft_at, num_rejected, rejected_at, positions, kv_lens, key_places,
    table_rows, table, BLOCK_SIZE: tl.constexpr, rejected_at_records, pending, held,
    num_ids, num_tokens, num_records, table_stride,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = at < num_ids
    token = tl.load(ids + at, mask=own, other=0)
    if drafted is not None:
        place = tl.load(draft_at + at, mask=own, other=-1)
        token = tl.where(place < 0, token, tl.load(drafted + place, mask=place >= 0, other=0))
    known = tl.load(last_sampled + tl.load(rows + at, mask=own, other=0), mask=own & (token < 0), other=0)
    tl.store(ids + at, tl.where(token < 0, known, token), mask=own)
    if num_rejected is not None:
        inside, row = at < num_tokens, at % num_ids
        back = tl.load(num_rejected + tl.load(rejected_at + row, mask=inside, other=0), mask=inside, other=0)
        if key_places is not None:
            there = tl.load(positions + at, mask=inside, other=0) - back
            kept = tl.load(key_places + at, mask=inside, other=-1) >= 0
            line = tl.load(table_rows + row, mask=kept, other=0).to(tl.int64) * table_stride
            block = tl.load(table + line + there // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
            tl.store(key_places + at, block * BLOCK_SIZE + there % BLOCK_SIZE, mask=kept)
        _take_back(positions, at, inside, back)
        _take_back(kv_lens, at, inside, back)
        inside = at < num_records
        back = tl.load(num_rejected + tl.load(rejected_at_records + at, mask=inside, other=0), mask=inside, other=0)
        _take_back(pending, at, inside, back)
        if held is not None:
            _take_back(held, at, inside, back)


def catch_up(ids: IdColumns, columns: OptimisticColumns | None = None) -> None:
    num_ids = num_tokens = len(ids.rows)
    num_records = stride = 0
    if columns is not None:
        num_tokens, num_records = columns.positions.numel(), len(columns.rejected_at_records)
        stride = columns.table.stride(0)
        assert num_records <= num_tokens and num_ids == len(columns.rejected_at), "programs are for tokens"
    given = columns or [None] * len(OptimisticColumns._fields)
    operands = (*ids, *given, num_ids, num_tokens, num_records, stride)
    _catch_up_kernel[(ceil_div(num_tokens, TILE.value),)](*operands, num_warps=4)


@triton.jit
def _newest_kernel(
    windows, records, slots, lines, pending, out, slot_stride, line_stride, token_stride, width
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside, last = at < width, tl.load(pending + row) - 1
    record = records + tl.load(lines + row) * line_stride + tl.maximum(last, 0) * token_stride
    of_line = tl.load(record + at, mask=inside & (last >= 0), other=0.0)
    of_slot = tl.load(windows + tl.load(slots + row) * slot_stride + at, mask=inside & (last < 0), other=0.0)
    tl.store(out + row * width + at, tl.where(last >= 0, of_line, of_slot), mask=inside)


def newest(windows: Tensor, records: Tensor, slots: Tensor, lines: Tensor, pending: Tensor) -> Tensor:
    num_rows, width = len(slots), windows.shape[1]
    out = torch.empty((num_rows, width), dtype=windows.dtype, device=windows.device)
    strides = (windows.stride(0), records.stride(0), records.stride(1), width)
    grid = (num_rows, ceil_div(width, WIDTH.value))
    _newest_kernel[grid](windows, records, slots, lines, pending, out, *strides, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=COLUMNS)
def _accept_kernel(
    token_ids, finite, drafts, rows, starts, sizes, last_sampled, num_rejected, drafted, draft_at, results,
    num_positions,
):  # fmt: skip
    row, at = tl.program_id(0), tl.arange(0, MOST)
    size, place = tl.load(sizes + row), tl.load(starts + row) + at
    own = at < size
    answer = tl.load(token_ids + place, mask=own, other=0)
    answer = tl.where(tl.load(finite + place, mask=own, other=0) != 0, answer, FAILED)
    draft = tl.load(drafts + place, mask=own, other=0)
    if draft_at is not None:
        there = tl.load(draft_at + place, mask=own, other=-1)
        draft = tl.where(there < 0, draft, tl.load(drafted + there, mask=there >= 0, other=0))
    # the last accepted position: the first one whose draft is wrong
    last = tl.min(tl.where(own & (answer == draft), MOST, at))
    tl.store(results + place, answer, mask=own)
    tl.store(results + num_positions + row, (last + 1).to(tl.int64))
    line = tl.load(rows + row)
    newest_id = tl.sum(tl.where(at == last, answer, 0))
    tl.store(last_sampled + line, tl.maximum(newest_id, 0))  # a row that is not finite has no id
    tl.store(num_rejected + line, size - 1 - last)


def accept(token_ids: Tensor, finite: Tensor, columns: SpanColumns) -> Tensor:
    num_positions, num_rows = len(columns.drafts), len(columns.rows)
    results = torch.empty(num_positions + num_rows, dtype=torch.int64, device=token_ids.device)
    operands = (token_ids, finite, *columns[:-1], results, num_positions)
    _accept_kernel[(num_rows,)](*operands, num_warps=1)
    return results

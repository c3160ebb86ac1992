"""Recurrence steps for rows whose states are written every few tokens (RecordIndex), in Triton.

record.py has the formulas. Two launches compute a step:

1. heads_kernel.py, one program per row and key head, computes everything that does not need the state: records, gates,
   and the products of keys and queries with the recorded keys.
2. `_record_kernel`, one program per row, head and BLOCK_V value rows, reads its part of the state once. Most rows only
   read it. A row whose records reach a multiple of the interval folds them and writes the state.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import await_inputs, capped_registers, overlap, straight
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import ConvTaps, Out, Records, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import head_tile, key_block, no_tokens, result, sizes
from forkpoint.ops.recurrence.heads_kernel import launch_heads
from forkpoint.ops.recurrence.lines import extent
from forkpoint.ops.recurrence.state_rows import (
    FOLDS,
    LANES,
    Sizes,
    answer,
    fold,
    folded_in,
    inputs_of,
    state_tile,
    to_fold,
)
from forkpoint.ops.recurrence.straight_record_kernel import straight_record_kernel
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.platforms.table import traits_of

MOST_CHANNELS = 512  # value channels of a key head that the first kernel can convolve in one program
BLOCK_V = 16  # value rows per program
MOST_REGISTERS = 128  # per thread, so that sixteen programs fit on a processor


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _record_kernel(
    mixed,
    skip,
    pool,
    out,
    gates,
    records,
    index,
    num_rows,
    num_tokens,
    mixed_stride,
    slot_stride,
    S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
    COMPUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_V value rows of one head of one row with at most MOST tokens.

    The state is read once. It is written only if records are folded or if it moves to another slot."""
    part, head, row = head_tile(S.HV, S.V, BLOCK_V)
    src, dst, cu_tokens, line, written, held, mark, mark_dst = index
    at = part * BLOCK_V + tl.arange(0, BLOCK_V)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    first = tl.load(cu_tokens + row).to(tl.int64)
    length, last = (tl.load(cu_tokens + row + 1) - first).to(tl.int32), tl.load(cu_tokens + num_rows)
    own, position, marked = tl.load(line + row).to(tl.int64), tl.load(mark + row), tl.load(mark_dst + row).to(tl.int64)
    start, folded, rest = extent(row, written, held, S.INTERVAL)
    AT_ONCE: tl.constexpr = S.INTERVAL <= FOLDS and S.LINE < 2 * S.INTERVAL  # one interval is due at most
    place, inside = state_tile(pool + head * (S.V * S.K), at * S.K, at < S.V, S.K, S.BLOCK_K, LANES)
    slot, there = place + source * slot_stride, inside & (source >= 0)
    line_at = records[0] + (own * S.LINE * S.HV + head) * S.V
    read = mixed, mixed_stride, gates, line_at, start + folded
    # The two branches repeat code so that each keeps only its own values in registers. Most rows only read their state.
    if folded > 0:
        position = tl.where(position <= folded, position, 0)
        middle = tl.where(position > 0, position, folded)
        state = tl.load(slot, mask=there, other=0.0).to(tl.float32)
        if AT_ONCE:  # load the records together with the state
            recorded = to_fold(0, middle, start, own, head, at, records, S)
        state = (
            folded_in(state, recorded, S.TF32) if AT_ONCE else fold(state, 0, middle, start, own, head, at, records, S)
        )
        if position > 0:
            tl.store(place + marked * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
            state = fold(state, middle, folded, start, own, head, at, records, S)
        await_inputs(OVERLAP)  # the first kernel has already waited for everything loaded above
        if COMPUTES:
            loaded = inputs_of(first, length, rest, head, at, *read, S)
        if target >= 0:
            tl.store(place + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
        if COMPUTES:
            answer(state, loaded, first, length, rest, head, at, read, skip, out, S, MOST)
    else:
        kept = tl.load(slot, mask=there, other=0.0)  # unconverted, for the copy
        await_inputs(OVERLAP)
        if COMPUTES:
            loaded = inputs_of(first, length, rest, head, at, *read, S)
        if (target >= 0) & (source != target):
            tl.store(place + target * slot_stride, kept, mask=inside)
        if COMPUTES:
            answer(kept.to(tl.float32), loaded, first, length, rest, head, at, read, skip, out, S, MOST)
    if COMPUTES:
        for token in range(last + row, num_tokens, num_rows):  # padding
            nothing = tl.zeros((BLOCK_V,), out.dtype.element_ty)
            tl.store(out + (token * S.HV + head) * S.V + at, nothing, mask=at < S.V)


def recurrence_record(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """Compute the tokens of rows whose states are written every few tokens (`table.Recorded`).

    Tokens of no row get zeros.
    """
    return _launch(inputs, params, pool, index, records, result(inputs, params, pool, out))


def conv_record(
    inputs: RecurrenceInputs,
    taps: ConvTaps,
    windows: Tensor,
    rows: DecodeIndex,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Out = None,
) -> Tensor | None:
    """Convolve one token per row, then run recurrence_record on it (`table.ConvRecord`).

    None: the convolution has a bias or no SiLU, or a key head has more than MOST_CHANNELS value channels.
    """
    spec, convolution = params.spec, (taps.weight, windows, rows)
    if taps.bias is not None or not taps.silu or spec.num_v_heads // spec.num_k_heads * spec.value_dim > MOST_CHANNELS:
        return None
    return _launch(inputs, params, pool, index, records, result(inputs, params, pool, out), convolution)


def recurrence_flush(pool: Tensor, index: RecordIndex, records: Records) -> None:
    """Fold the records that are due into the states, as recurrence_record does before its tokens."""
    inputs, params = no_tokens(pool, records)
    _launch(inputs, params, pool, index, records, inputs.mixed)


def _launch(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Tensor,
    convolution: tuple[Tensor, Tensor, DecodeIndex] | None = None,
) -> Tensor:
    spec, (updates, *kept) = params.spec, records
    assert all(record.is_contiguous() for record in records), "records must be dense"
    num_tokens, num_rows = inputs.mixed.shape[0], len(index)
    shapes: dict[str, Any] = {**sizes(spec), "INTERVAL": index.interval, "LENGTH": kept[0].shape[1]}
    most = 1 if convolution is not None else updates.shape[1] + 1 - index.interval  # tokens of a row at most
    shapes |= {"BLOCK_K": key_block(spec), "PAST": next_power_of_2(index.interval - 1 + most)}
    options = {**overlap(pool.device, num_tokens), "num_warps": 1, "num_stages": 1}
    mixed = gates = inputs.mixed
    if num_tokens:
        mixed, gates = launch_heads(inputs, params, index, kept, convolution, most, {**shapes, **options})
    one_by_one = straight(pool.device)["STRAIGHT"]
    block_v = launch_table(pool.device).state_values if one_by_one else BLOCK_V
    block_v = min(block_v, next_power_of_2(spec.value_dim))
    grid = (num_rows * spec.num_v_heads * ceil_div(spec.value_dim, block_v),)
    given, counts = (mixed, params.D, pool, out, gates), (num_rows, num_tokens)
    own: dict[str, Any] = {"mixed_stride": mixed.stride(0), "slot_stride": pool.stride(0)}
    own |= {"BLOCK_V": block_v, "COMPUTES": num_tokens > 0}
    shapes |= {"LINE": updates.shape[1], "DELTA": spec.delta}
    if one_by_one:
        straight_record_kernel[grid](*given, *records, *index.columns, *counts, **own, **shapes, num_warps=1)
        return out
    own |= {"MOST": most, **options, **capped_registers(pool.device, MOST_REGISTERS)}
    shapes |= {"FOUND": max(16, shapes["PAST"]), "TF32": traits_of(pool.device).multiplies_tf32}
    _record_kernel[grid](*given, tuple(records), tuple(index.columns), *counts, **own, S=Sizes(**shapes))
    return out

"""Rows whose states are written every few tokens, in Triton: see RecordIndex. record.py has the formulas.

A first kernel, in heads_kernel.py, does what does not need the state. The second reads states, a few value rows in each
of many programs.
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
from forkpoint.ops.recurrence.state_rows import Sizes, advance, fold, found_before, state_tile
from forkpoint.ops.recurrence.straight_record_kernel import straight_record_kernel

MOST_CHANNELS = 512  # of the value heads of a key head, that the first kernel convolves
WINDOW = 2  # tokens of a row with drafts that read the state together
FEW_ROWS = 64  # of one token; above, a program takes several parts of a state
FOLDS = 2  # records that are folded together
MOST_REGISTERS = 128  # of their programs: for the room of three there are four
# Keys of a value row that lie side by side in a tile, parts of a program, and of them those under way together.
ONE_PART: dict[str, Any] = {"SIDE": 32, "TURNS": 1, "STAGES": 1}
PARTS: dict[str, Any] = {"SIDE": 64, "TURNS": 2, "STAGES": 3}


@triton.jit
def _value_of(mixed, stride, token, head, S: tl.constexpr):
    """Where a token's value of a head lies, behind its queries and keys."""
    return mixed + token * stride + 2 * S.H * S.K + head * S.V


@triton.jit
def _part(heads, source, slot_stride, line_at, ring, here, at, S: tl.constexpr):
    """Value rows `at` of a state in slot `source`, and of the records that stay."""
    slot = heads + source * slot_stride
    place, inside = state_tile(slot, at * S.K, (at < S.V) & (source >= 0), S.K, S.BLOCK_K, S.SIDE)
    state = tl.load(place, mask=inside, other=0.0)
    return state, tl.load(line_at + ring + at[None, :], mask=here & (at < S.V)[None, :], other=0.0)


@triton.jit
def _alone(state, kept, found, skip, head, where, begin, at, length, S: tl.constexpr):
    """The only token of a row, if it has one."""
    value_at, stride, out_at, line_at = where
    where = value_at + at, stride, out_at + at, line_at + at
    advance(state.to(tl.float32), kept, found, skip, head, where, begin, (at < S.V) & (length > 0), S, 1)


@triton.jit
def _tokens(
    state, kept, low, high, length, first, begin, rest, head, at, line_at, given, S: tl.constexpr, CHUNK: tl.constexpr
):
    """Tokens `[low, high)` of a row, CHUNK at a time. -> `kept`, with their updates if more tokens come."""
    mixed, stride, skip, gates, out = given
    past = tl.arange(0, S.PAST)
    for t in range(low, high, CHUNK):
        found, token = found_before(first, t, rest, head, mixed, stride, gates, S, CHUNK), first + t
        value_at, out_at = _value_of(mixed, stride, token, head, S) + at, out + (token * S.HV + head) * S.V + at
        where = value_at, stride, out_at, line_at + at
        fresh = advance(state, kept, found, skip, head, where, begin + t, at < S.V, S, CHUNK)
        if t + CHUNK < length:
            for j in tl.static_range(CHUNK):
                kept = tl.where((past == rest + t + j)[:, None], fresh[j][None, :], kept)
    return kept


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
    TURNS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """TURNS times BLOCK_V value rows of one head of one row, one turn after another: the state is read, and written
    where it is taken on or moves. With several turns rows have one token or none."""
    part, head, row = head_tile(S.HV, S.V, BLOCK_V * TURNS)
    src, dst, cu_tokens, line, written, held, mark, mark_dst = index
    at, past = part * (BLOCK_V * TURNS) + tl.arange(0, BLOCK_V), tl.arange(0, S.PAST)
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    own, position = tl.load(line + row).to(tl.int64), tl.load(mark + row)
    first = tl.load(cu_tokens + row).to(tl.int64)
    length, last = (tl.load(cu_tokens + row + 1) - first).to(tl.int32), tl.load(cu_tokens + num_rows)
    start, folded, rest = extent(row, written, held, S.INTERVAL)
    heads, line_at = pool + head * (S.V * S.K), records[0] + (own * S.LINE * S.HV + head) * S.V
    ring, here = (((start + folded + past) % S.LINE) * (S.HV * S.V))[:, None], (past < rest)[:, None]
    state, kept = _part(heads, source, slot_stride, line_at, ring, here, at, S)
    position = tl.where(position <= folded, position, 0)
    middle, marked = tl.where(position > 0, position, folded), tl.load(mark_dst + row).to(tl.int64)
    given = (mixed, mixed_stride, skip, gates, out)
    stores = (target >= 0) & ((folded > 0) | (source != target))
    if TURNS > 1:
        await_inputs(OVERLAP)
    begin = start + folded + rest
    if TURNS > 1:
        token = tl.minimum(first, num_tokens - 1)
        found = found_before(token, 0, rest, head, mixed, mixed_stride, gates, S, 1)
        value_at, out_at = _value_of(mixed, mixed_stride, token, head, S), out + (token * S.HV + head) * S.V
        where = value_at, mixed_stride, out_at, line_at
    if (folded > 0) | stores | (TURNS == 1):
        for turn in range(TURNS):
            if turn > 0:
                at += BLOCK_V
                state, kept = _part(heads, source, slot_stride, line_at, ring, here, at, S)
            wide = state.to(tl.float32)
            place, inside = state_tile(heads, at * S.K, at < S.V, S.K, S.BLOCK_K, S.SIDE)
            if folded > 0:
                wide = fold(wide, 0, middle, start, own, head, at, records, S)
            if TURNS == 1:
                await_inputs(OVERLAP)  # the first kernel has waited for all that is loaded above
            if position > 0:
                tl.store(place + marked * slot_stride, wide.to(pool.dtype.element_ty), mask=inside)
                if middle < folded:
                    wide = fold(wide, middle, folded, start, own, head, at, records, S)
            if stores:
                tl.store(place + target * slot_stride, wide.to(pool.dtype.element_ty), mask=inside)
            if COMPUTES:
                tl.debug_barrier()  # what is read of the line above is written over
                if TURNS > 1:
                    _alone(wide, kept, found, skip, head, where, begin, at, length, S)
                else:
                    whole = length - length % CHUNK
                    kept = _tokens(wide, kept, 0, whole, length, first, begin, rest, head, at, line_at, given, S, CHUNK)
                    if CHUNK > 1:
                        kept = _tokens(
                            wide, kept, whole, length, length, first, begin, rest, head, at, line_at, given, S, 1
                        )
    else:
        if TURNS > 1:  # nothing but reads, which the compiler starts ahead
            _alone(state, kept, found, skip, head, where, begin, at, length, S)
            for turn in tl.range(1, TURNS, num_stages=STAGES):
                later = at + turn * BLOCK_V
                state, kept = _part(heads, source, slot_stride, line_at, ring, here, later, S)
                _alone(state, kept, found, skip, head, where, begin, later, length, S)
    if COMPUTES:
        whole_part = part * (BLOCK_V * TURNS) + tl.arange(0, BLOCK_V * TURNS)
        for token in range(last + row, num_tokens, num_rows):  # padding's
            nothing = tl.zeros((BLOCK_V * TURNS,), out.dtype.element_ty)
            tl.store(out + (token * S.HV + head) * S.V + whole_part, nothing, mask=whole_part < S.V)


def recurrence_record(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    pool: Tensor,
    index: RecordIndex,
    records: Records,
    out: Out = None,
) -> Tensor:
    """See `table.Recorded`; what tokens of no row get is zero."""
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
    """See `table.ConvRecord`: without a bias, with SiLU, and where few value heads share a key head."""
    spec, convolution = params.spec, (taps.weight, windows, rows)
    if taps.bias is not None or not taps.silu or spec.num_v_heads // spec.num_k_heads * spec.value_dim > MOST_CHANNELS:
        return None
    return _launch(inputs, params, pool, index, records, result(inputs, params, pool, out), convolution)


def recurrence_settle(pool: Tensor, index: RecordIndex, records: Records) -> None:
    """What recurrence_record does before the tokens."""
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
    most = 1 if convolution is not None else updates.shape[1] + 1 - index.interval  # tokens of a row
    shapes |= {"BLOCK_K": key_block(spec), "PAST": triton.next_power_of_2(index.interval - 1 + most)}
    options = {**overlap(pool.device, num_tokens), "num_warps": 1, "num_stages": 1}
    mixed = gates = inputs.mixed
    if num_tokens:
        mixed, gates = launch_heads(inputs, params, index, kept, convolution, {**shapes, **options})
    one_by_one, form, chunk, rows = straight(pool.device)["STRAIGHT"], ONE_PART, 1, 1
    if num_tokens > num_rows and not one_by_one:
        chunk = rows = WINDOW
    elif convolution is not None and min(num_tokens, num_rows) > FEW_ROWS and not one_by_one:
        form = PARTS  # else rows, of which some are padding, may have several tokens though there are no more than rows
    elif pool.element_size() == 2 and not one_by_one:  # as many bytes of shorter ones
        rows = 2
    block_v = min(launch_table(pool.device).state_values * rows, triton.next_power_of_2(spec.value_dim))
    grid = (num_rows * spec.num_v_heads * triton.cdiv(spec.value_dim, block_v * form["TURNS"]),)
    given, counts = (mixed, params.D, pool, out, gates), (num_rows, num_tokens)
    own: dict[str, Any] = {"mixed_stride": mixed.stride(0), "slot_stride": pool.stride(0)}
    own |= {"BLOCK_V": block_v, "COMPUTES": num_tokens > 0}
    shapes |= {"LINE": updates.shape[1], "DELTA": spec.delta}
    if one_by_one:
        straight_record_kernel[grid](*given, *records, *index.columns, *counts, **own, **shapes, num_warps=1)
        return out
    if rows > 1 or form is PARTS:
        options |= capped_registers(pool.device, MOST_REGISTERS)
    own |= {"TURNS": form["TURNS"], "STAGES": form["STAGES"], "CHUNK": chunk, **options}
    shapes |= {"SIDE": form["SIDE"], "FOLDS": FOLDS, "MOST": triton.next_power_of_2(updates.shape[1])}
    _record_kernel[grid](*given, tuple(records), tuple(index.columns), *counts, **own, S=Sizes(**shapes))
    return out

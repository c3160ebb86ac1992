"""The first launch of a step with records (record_kernel.py): everything that does not need the state.

For each token and key head it writes a record and gates. It computes the products of the token's key and query with the
recorded keys and with the row's earlier tokens, weighted by the decays between them. For rows of one token, the launch
may include the short convolution.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.conv1d.kernel import check_layout, load_rows
from forkpoint.ops.launch import await_inputs, capped_registers, straight
from forkpoint.ops.metadata import DecodeIndex, RecordIndex
from forkpoint.ops.parameters import Records, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.gates import L2_EPS, decay, described, weight
from forkpoint.ops.recurrence.lines import GATES, end_of_line, extent, places, read_line, write_line
from forkpoint.ops.recurrence.state_rows import (
    LANES,
    SIDE,
    TOKENS,
    as_factor,
    keys_and_queries,
    product,
    state_tile,
    whole_product,
)
from forkpoint.ops.rounding import next_power_of_2
from forkpoint.platforms.table import traits_of

MOST_TOGETHER = 512  # scores that a warp can hold in registers to store the gates of TOKENS tokens together
MOST_REGISTERS = 128  # per thread of a program that convolves, so that the programs of 128 rows run at once


@triton.jit
def _convolved(x, old, taps, new, row_stride, present, kept, W: tl.constexpr):
    """Return a token's convolved channels in x's dtype, with conv_update's rounding, and store its window at `new`."""
    newest = tl.load(x, mask=present, other=0.0)
    total = tl.zeros(present.shape, tl.float32)
    for j in tl.static_range(W - 1):
        total += old[j].to(newest.dtype).to(tl.float32) * taps[j].to(tl.float32)
        if j > 0:
            tl.store(new + (j - 1) * row_stride, old[j], mask=kept)
    total += newest.to(tl.float32) * taps[W - 1].to(tl.float32)
    tl.store(new + (W - 2) * row_stride, newest.to(new.dtype.element_ty), mask=kept)
    return silu(total).to(newest.dtype)


@triton.jit
def _products(others, given, TF32: tl.constexpr):
    """Return the products `[others, given]` of two sets of keys. Products of bfloat16 and float16 keys are exact."""
    others, given = as_factor(others), tl.trans(as_factor(given))
    return whole_product(others, given, TF32) if given.dtype == tl.float32 else tl.dot(others, given)


@triton.jit
def _leave(gate_at, by_key, by_query, by_own, k_scale, q_scale, beta, since, past, place, shared):
    """Store the gates and scores of token `place` of `past`, for all value heads.

    The gates are: decay times key scale, beta, key times query, decay times query scale. The scores are the products of
    its key and its query with each earlier entry, times the decay since that entry. `since[entries, heads]` are
    cumulative sums of g."""
    total = tl.sum(tl.where((past == place)[:, None], since, 0.0), axis=0)
    left = tl.where((past < place)[:, None], tl.exp(total[None, :] - since), 0.0)
    tl.store(gate_at, tl.exp(total) * k_scale, mask=shared)
    tl.store(gate_at + 1, beta, mask=shared)
    tl.store(gate_at + 2, by_own, mask=shared)
    tl.store(gate_at + 3, tl.exp(total) * q_scale, mask=shared)
    found_at = gate_at[None, :] + GATES + past[:, None]
    tl.store(found_at, left * by_key[:, None], mask=shared[None, :])
    tl.store(found_at + past.shape[0], left * by_query[:, None], mask=shared[None, :])


@triton.jit
def _leave_together(gate_at, found, grown, beta, since, past, own_places, shared):
    """Store the gates and scores of TOKENS tokens, at `own_places` of `past`, as `_leave` does for one token.

    `found[entries, 2 * TOKENS]` are the products of keys and queries in turn, and `grown` their scales. `gate_at`,
    `beta` and `shared` are `[TOKENS, heads]`."""
    by_key, by_query = tl.split(tl.reshape(found, (past.shape[0], own_places.shape[0], 2)))
    k_scale, q_scale = tl.split(tl.reshape(grown, (own_places.shape[0], 2)))
    is_own, before = past[:, None] == own_places[None, :], past[:, None] < own_places[None, :]
    total = tl.sum(tl.where(is_own[:, :, None], since[:, None, :], 0.0), axis=0)
    left = tl.where(before[:, :, None], tl.exp(total[None, :, :] - since[:, None, :]), 0.0)
    by_own = tl.sum(tl.where(is_own, by_query, 0.0), axis=0)
    tl.store(gate_at, tl.exp(total) * k_scale[:, None], mask=shared)
    tl.store(gate_at + 1, beta, mask=shared)
    tl.store(gate_at + 2, tl.broadcast_to(by_own[:, None], shared.shape), mask=shared)
    tl.store(gate_at + 3, tl.exp(total) * q_scale[:, None], mask=shared)
    found_at, is_there = gate_at[None, :, :] + GATES + past[:, None, None], shared[None, :, :]
    tl.store(found_at, left * by_key[:, :, None], mask=is_there)
    tl.store(found_at + past.shape[0], left * by_query[:, :, None], mask=is_there)


@triton.jit
def _heads_kernel(
    mixed,
    taps,
    windows,
    convolved,
    a,
    b,
    a_log,
    dt_bias,
    gates,
    keys,
    scales,
    decays,
    src,
    dst,
    cu_tokens,
    line,
    written,
    held,
    mixed_stride,
    slot_stride,
    row_stride,
    tap_channel,
    tap_stride,
    a_stride,
    b_stride,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    INTERVAL: tl.constexpr,
    LENGTH: tl.constexpr,
    PAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    TF32: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one key head of a row and the value heads that share it: records of keys and decays, gates and scores.

    With a convolution (W > 0) rows have at most one token, and its output goes to `convolved`."""
    pid = tl.program_id(0)
    key_head, row = pid % H, pid // H
    first = tl.load(cu_tokens + row).to(tl.int64)
    length = (tl.load(cu_tokens + row + 1) - first).to(tl.int32)
    start, folded, rest = extent(row, written, held, INTERVAL)
    own = tl.load(line + row).to(tl.int64) * LENGTH
    col, past = tl.arange(0, BLOCK_K), tl.arange(0, PAST)
    channel, present = (H + key_head) * K + col, (col < K) & (length > 0)
    if W > 0:
        source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
        at = tl.arange(0, CHANNELS)
        v_channel, is_value = 2 * H * K + key_head * (HV // H) * V + at, (at < HV // H * V) & (length > 0)
        old, new = windows + source * slot_stride, windows + target * slot_stride
        seen, moves = source >= 0, target >= 0
        k_old = load_rows(old + channel, row_stride, present & seen, W - 1)
        q_old = load_rows(old + channel - H * K, row_stride, present & seen, W - 1)
        v_old = load_rows(old + v_channel, row_stride, is_value & seen, W - 1)
        k_taps = load_rows(taps + channel * tap_channel, tap_stride, present, W)
        q_taps = load_rows(taps + (channel - H * K) * tap_channel, tap_stride, present, W)
        v_taps = load_rows(taps + v_channel * tap_channel, tap_stride, is_value, W)
    # Value heads are padded to a power of two. Entries are the records that stay, then the row's tokens.
    head = key_head * (HV // H) + tl.arange(0, GROUP)
    shared = tl.arange(0, GROUP) < HV // H
    kept, fresh = past < rest, (past >= rest) & (past < rest + length)
    near, entry = first + past - rest, own + places(start + folded, past, LENGTH, STRAIGHT)
    end = end_of_line(start + folded, 0, rest, LENGTH)
    old_at, there = state_tile(keys, (entry * H + key_head) * K, kept, K, BLOCK_K, SIDE)
    others = read_line(old_at, there, past[:, None, None], end, LENGTH, H * K, STRAIGHT)
    decay_at = decays + entry[:, None] * HV + head[None, :]
    old_g = read_line(decay_at, kept[:, None] & shared[None, :], past[:, None], end, LENGTH, HV, STRAIGHT)
    scale_at = scales + entry * H + key_head
    old_scale = read_line(scale_at, kept, past, end, LENGTH, H, STRAIGHT)
    rate, bias = tl.load(a_log + head, mask=shared, other=0.0), tl.load(dt_bias + head, mask=shared, other=0.0)
    await_inputs(OVERLAP)  # nothing loaded above was written by the previous launch
    key_at, b_at = mixed + first * mixed_stride + channel, b + first * b_stride + head
    if W > 0:
        raw_b = tl.load(b_at, mask=shared & (length > 0), other=0.0)
        raw_a = tl.load(a + first * a_stride + head, mask=shared & (length > 0), other=0.0)[None, :]
        raw = _convolved(key_at, k_old, k_taps, new + channel, row_stride, present, present & moves, W)
        q_at, new_q = key_at - H * K, new + channel - H * K
        raw_q = _convolved(q_at, q_old, q_taps, new_q, row_stride, present, present & moves, W)
        v_at, new_v = mixed + first * mixed_stride + v_channel, new + v_channel
        value = _convolved(v_at, v_old, v_taps, new_v, row_stride, is_value, is_value & moves, W)
        out_at = convolved + first * (2 * H * K + HV * V)
        tl.store(out_at + v_channel, value, mask=is_value)
        tl.store(out_at + channel, raw, mask=present)
        tl.store(out_at + channel - H * K, raw_q, mask=present)
        others = others.to(tl.float32)
    else:
        raw_a = tl.load(a + near[:, None] * a_stride + head[None, :], mask=fresh[:, None] & shared[None, :], other=0.0)
        new_at, there = state_tile(mixed, near * mixed_stride + (H + key_head) * K, fresh, K, BLOCK_K, SIDE)
        fresh_keys = tl.load(new_at, mask=there, other=0.0)
        others = tl.where(fresh[:, None, None], fresh_keys, others)
        if STRAIGHT:
            others = others.to(tl.float32)
    g, step = decay(raw_a, rate[None, :], bias[None, :], LOW, HIGH)
    g = tl.where(fresh[:, None], g, old_g)
    since = tl.cumsum(g, axis=0)
    new_scale = tl.full((PAST,), 1.0, tl.float32)
    if DELTA:
        if W > 0:
            new_scale *= tl.rsqrt(tl.sum(raw.to(tl.float32) * raw.to(tl.float32), axis=0) + L2_EPS)
        else:
            squares = others.to(tl.float32) * others.to(tl.float32)
            new_scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=1) + L2_EPS)
    scaled = tl.where(fresh, new_scale, old_scale)
    end = end_of_line(start + folded, rest, rest + length, LENGTH)
    write_line(scale_at, new_scale, fresh, past, end, LENGTH, H, STRAIGHT)
    write_line(decay_at, g, fresh[:, None] & shared[None, :], past[:, None], end, LENGTH, HV, STRAIGHT)
    if W > 0 or STRAIGHT:
        for t in range(1 if W > 0 else length):  # a convolution also runs padded rows, whose masks are empty
            if STRAIGHT:  # the compiler for NPUs rejects pointers that a branch changes
                own_at, own_b = key_at + t * mixed_stride, b_at + t * b_stride
                raw, raw_q = tl.load(own_at, mask=col < K, other=0.0), tl.load(own_at - H * K, mask=col < K, other=0.0)
                raw_b = tl.load(own_b, mask=shared, other=0.0)
            q, k, k_scale, q_scale = raw_q.to(tl.float32), raw.to(tl.float32), 1.0, 1.0
            ring, is_own = own + (start + folded + rest + t) % LENGTH, past == rest + t
            if DELTA:
                k_scale = tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
                q_scale = tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
                q, k = q * q_scale, k * k_scale
                beta = weight(raw_b, DOUBLE_BETA)
            else:
                beta = tl.sum(tl.where(is_own[:, None], step, 0.0), axis=0)
            tl.store(keys + (ring * H + key_head) * K + col, raw, mask=present)
            by_key, by_query = scaled * product(others, k, SIDE), scaled * product(others, q, SIDE)
            gate_at = gates + ((first + t) * HV + head) * (GATES + 2 * PAST)
            by_own = tl.sum(k * q, axis=0)
            _leave(
                gate_at, by_key, by_query, by_own, k_scale, q_scale, beta, since, past, rest + t, shared & (length > 0)
            )
    else:  # the products of TOKENS tokens at once
        one, both = tl.arange(0, TOKENS), tl.arange(0, 2 * TOKENS)
        for begin in range(0, length, TOKENS):
            token, count = first + begin, length - begin
            token_at, is_token = keys_and_queries(mixed, mixed_stride, token, count, key_head, H, K, BLOCK_K)
            given, is_query = tl.load(token_at, mask=is_token, other=0.0), both % 2 == 1
            is_shared = (one < count)[:, None] & shared[None, :]
            if DELTA and TOGETHER:
                raw_b = tl.load(b_at[None, :] + (begin + one)[:, None] * b_stride, mask=is_shared, other=0.0)
            ring = own + (start + folded + rest + begin + both // 2) % LENGTH
            record_at, is_key = state_tile(keys, (ring * H + key_head) * K, both % 2 == 0, K, BLOCK_K, SIDE)
            tl.store(record_at, given, mask=is_token & is_key)
            grown = tl.full((2 * TOKENS,), 1.0, tl.float32)
            if DELTA:
                lengths = tl.sum(tl.sum(given.to(tl.float32) * given.to(tl.float32), axis=1), axis=1)
                grown = tl.rsqrt(lengths + L2_EPS) * tl.where(is_query, scale, 1.0)
            found = _products(others, given, TF32) * scaled[:, None] * grown[None, :]
            gate_at = gates + ((token + one)[:, None] * HV + head[None, :]) * (GATES + 2 * PAST)
            if TOGETHER:
                own_places = rest + begin + one
                if DELTA:
                    beta = weight(raw_b, DOUBLE_BETA)
                else:
                    is_own = past[:, None] == own_places[None, :]
                    beta = tl.sum(tl.where(is_own[:, :, None], step[:, None, :], 0.0), axis=0)
                _leave_together(gate_at, found, grown, beta, since, past, own_places, is_shared)
            else:
                for j in range(tl.minimum(count, TOKENS)):
                    t = begin + j
                    is_own = past == rest + t
                    by_key = tl.sum(tl.where((both == 2 * j)[None, :], found, 0.0), axis=1)
                    by_query = tl.sum(tl.where((both == 2 * j + 1)[None, :], found, 0.0), axis=1)
                    k_scale = tl.sum(tl.where(both == 2 * j, grown, 0.0), axis=0)
                    q_scale = tl.sum(tl.where(both == 2 * j + 1, grown, 0.0), axis=0)
                    if DELTA:
                        beta = weight(tl.load(b_at + t * b_stride, mask=shared, other=0.0), DOUBLE_BETA)
                    else:
                        beta = tl.sum(tl.where(is_own[:, None], step, 0.0), axis=0)
                    own_at = gates + ((first + t) * HV + head) * (GATES + 2 * PAST)
                    by_own = tl.sum(tl.where(is_own, by_query, 0.0), axis=0)
                    _leave(own_at, by_key, by_query, by_own, k_scale, q_scale, beta, since, past, rest + t, shared)


def launch_heads(
    inputs: RecurrenceInputs,
    params: RecurrenceParams,
    index: RecordIndex,
    kept: Records,
    convolution: tuple[Tensor, Tensor, DecodeIndex] | None,
    most: int,
    sizes: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Launch the kernel, which writes records of keys and decays; return (mixed, gates).

    `mixed` is convolved if there is a `convolution` (taps, windows, rows). `kept` are the records of keys, key scales
    and decays. `most` is the largest number of tokens of a row.
    """
    ((mixed, *gated), options), spec, form = described(inputs, params), params.spec, straight(inputs.mixed.device)
    num_tokens, group = mixed.shape[0], spec.num_v_heads // spec.num_k_heads
    gates = kept[1].new_empty(num_tokens, spec.num_v_heads, GATES.value + 2 * sizes["PAST"])
    convolved = taps = windows = mixed
    slots: list[Tensor | None] = [None, None]
    options |= dict.fromkeys(("slot_stride", "row_stride", "tap_channel", "tap_stride", "W"), 0)
    if convolution is not None:
        taps, windows, rows = convolution
        check_layout(mixed, windows)
        convolved, slots = mixed.new_empty(mixed.shape), [*rows.columns]
        options |= {"slot_stride": windows.stride(0), "row_stride": windows.stride(1), "W": taps.shape[1]}
        options |= {"tap_channel": taps.stride(0), "tap_stride": taps.stride(1)}
        options |= capped_registers(mixed.device, MOST_REGISTERS)
    options |= {"GROUP": next_power_of_2(group), "CHANNELS": next_power_of_2(group * spec.value_dim)}
    options["TOGETHER"] = most > 1 and sizes["PAST"] * TOKENS.value * options["GROUP"] <= MOST_TOGETHER
    side = sizes["BLOCK_K"] if form["STRAIGHT"] else SIDE.value if convolution is not None else LANES.value
    options |= {"SIDE": side, "TF32": traits_of(mixed.device).multiplies_tf32, **form, **sizes}
    given = (mixed, taps, windows, convolved, *gated, gates, *kept, *slots)
    places = (index.cu_tokens, index.line, index.written, index.held)
    _heads_kernel[(len(index) * spec.num_k_heads,)](*given, *places, **options)
    return convolved, gates

"""One token a row through all that lies between a recurrent layer's projections, in one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.gated_delta.gates import L2_EPS, check_layout, gates, sizes
from forkpoint.ops.metadata import DecodeIndex
from forkpoint.ops.table import GDNLayer

HEADS = 1  # value heads whose states a program holds at a time
WARPS = 8


@triton.jit
def _convolve(x, weight, pool, source, slot_stride, row_stride, channel, present, W: tl.constexpr):
    """fp32 `silu(sum_j w_j x_j)` of the window in slot `source` and the newest inputs `x`."""
    total = tl.load(x + channel, mask=present, other=0.0).to(tl.float32)
    total *= tl.load(weight + channel * W + W - 1, mask=present, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        if source >= 0:
            at = pool + source * slot_stride + j * row_stride + channel
            value = tl.load(at, mask=present, other=0.0).to(tl.float32)
            total += value * tl.load(weight + channel * W + j, mask=present, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def _shift(x, pool, source, target, slot_stride, row_stride, channel, present, W: tl.constexpr):
    """The window in slot `source` and `x` behind it, to slot `target`. Rows ascend: target may be source."""
    if target >= 0:
        for j in tl.static_range(W - 2):
            old = tl.zeros_like(channel).to(pool.dtype.element_ty)
            if source >= 0:
                old = tl.load(pool + source * slot_stride + (j + 1) * row_stride + channel, mask=present, other=0.0)
            tl.store(pool + target * slot_stride + j * row_stride + channel, old, mask=present)
        newest = tl.load(x + channel, mask=present, other=0.0).to(pool.dtype.element_ty)
        tl.store(pool + target * slot_stride + (W - 2) * row_stride + channel, newest, mask=present)


@triton.jit
def _step_kernel(
    mixed,
    a,
    b,
    z,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    windows,
    pool,
    out,
    conv_src,
    conv_dst,
    src,
    dst,
    mixed_stride,
    a_stride,
    b_stride,
    z_stride,
    window_stride,
    window_row,
    slot_stride,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    DOUBLE_BETA: tl.constexpr,
):
    """One key head of one row with all its value heads, HEADS of them at a time.

    No other program reads or writes a window's channels or a state's rows that this one does, so that slots may be
    written in place.
    """
    pid = tl.program_id(0)
    key_head = pid % H
    row = (pid // H).to(tl.int64)
    GROUP: tl.constexpr = HV // H
    source, target = tl.load(src + row).to(tl.int64), tl.load(dst + row).to(tl.int64)
    from_slot, to_slot = tl.load(conv_src + row).to(tl.int64), tl.load(conv_dst + row).to(tl.int64)
    x = mixed + row * mixed_stride
    col = tl.arange(0, BLOCK_K)
    key, in_key = key_head * K + col, col < K
    q = _convolve(x, conv_weight, windows, from_slot, window_stride, window_row, key, in_key, W)
    k = _convolve(x, conv_weight, windows, from_slot, window_stride, window_row, H * K + key, in_key, W)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
    overlap = tl.sum(q * k, axis=0)
    # HEADS * BLOCK_V rows of the states of neighbouring heads.
    at = tl.arange(0, HEADS * BLOCK_V)
    value = at % BLOCK_V
    in_value = value < V
    for first in tl.range(0, GROUP, HEADS, num_stages=1):
        head = key_head * GROUP + first + at // BLOCK_V
        inside = in_value[:, None] & in_key[None, :]
        slot_at = pool + (head * V + value)[:, None] * K + col[None, :]
        state = tl.zeros((HEADS * BLOCK_V, BLOCK_K), tl.float32)
        if source >= 0:
            state = tl.load(slot_at + source * slot_stride, mask=inside, other=0.0).to(tl.float32)
        channel = 2 * H * K + head * V + value
        v = _convolve(x, conv_weight, windows, from_slot, window_stride, window_row, channel, in_value, W)
        raw_a, raw_b = tl.load(a + row * a_stride + head), tl.load(b + row * b_stride + head)
        g, beta = gates(raw_a, raw_b, tl.load(a_log + head), tl.load(dt_bias + head), DOUBLE_BETA)
        decay = tl.exp(g)
        fresh = beta * (v - decay * tl.sum(state * k[None, :], axis=1))
        answer = decay * tl.sum(state * q[None, :], axis=1) + fresh * overlap
        if target >= 0:
            state = decay[:, None] * state + fresh[:, None] * k[None, :]
            tl.store(slot_at + target * slot_stride, state.to(pool.dtype.element_ty), mask=inside)
        answer = tl.where(in_value, answer, 0.0)
        power = tl.sum(tl.reshape(answer * answer, (HEADS, BLOCK_V)), axis=1) / V
        by_head = tl.reshape(answer, (HEADS, BLOCK_V)) * tl.rsqrt(power + eps)[:, None]
        gate = silu(tl.load(z + row * z_stride + head * V + value, mask=in_value, other=0.0).to(tl.float32))
        gate *= tl.load(norm_weight + value, mask=in_value, other=0.0)
        answer = tl.reshape(by_head, (HEADS * BLOCK_V,)) * gate
        tl.store(out + (row * HV + head) * V + value, answer.to(out.dtype.element_ty), mask=in_value)
    # Every warp has read its window by then; now it may change.
    tl.debug_barrier()
    _shift(x, windows, from_slot, to_slot, window_stride, window_row, key, in_key, W)
    _shift(x, windows, from_slot, to_slot, window_stride, window_row, H * K + key, in_key, W)
    for first in tl.static_range(0, GROUP, HEADS):
        channel = 2 * H * K + (key_head * GROUP + first + at // BLOCK_V) * V + value
        _shift(x, windows, from_slot, to_slot, window_stride, window_row, channel, in_value, W)


def gdn_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Tensor,
    layer: GDNLayer,
    windows: Tensor,
    pool: Tensor,
    conv_index: DecodeIndex,
    index: DecodeIndex,
    out: Tensor | None = None,
) -> Tensor:
    """Convolution, recurrence and gated norm of one token a row: see `GDNStep`."""
    check_layout(mixed, a, b, pool)
    shape = layer.gates.shape
    rows, value_heads, value_dim = mixed.shape[0], shape.num_v_heads, shape.value_dim
    assert gate.stride(2) == 1 and gate.stride(1) == value_dim, "a row of the gate must be dense"
    assert windows.stride(2) == 1 and layer.conv_weight.is_contiguous(), "channels and taps must be dense"
    if out is None:
        out = torch.empty(rows, value_heads, value_dim, dtype=mixed.dtype, device=mixed.device)
    assert out.is_contiguous(), "the output must be dense"
    group = value_heads // shape.num_k_heads
    heads = HEADS if group % HEADS == 0 else 1
    _step_kernel[(rows * shape.num_k_heads,)](
        mixed,
        a,
        b,
        gate,
        layer.conv_weight,
        layer.gates.A_log,
        layer.gates.dt_bias,
        layer.norm_weight,
        windows,
        pool,
        out,
        conv_index.src,
        conv_index.dst,
        index.src,
        index.dst,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        gate.stride(0),
        windows.stride(0),
        windows.stride(1),
        pool.stride(0),
        shape.key_dim**-0.5,
        layer.norm_eps,
        **sizes(shape),
        W=layer.conv_weight.shape[1],
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=triton.next_power_of_2(value_dim),
        HEADS=heads,
        DOUBLE_BETA=shape.allow_neg_eigval,
        num_warps=WARPS,
    )
    return out

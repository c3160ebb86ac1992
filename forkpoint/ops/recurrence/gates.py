"""Gates, tiles and launch arguments that the Triton kernels of recurrences share."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid, softplus
from forkpoint.ops.parameters import Out, Records, Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.rounding import next_power_of_2

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def decay(a, a_log, dt_bias, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return (g, step) in fp32 from raw `a`: `step = softplus(a + dt_bias)`, `g = -exp(a_log) * step`."""
    rate = -tl.exp(a_log)
    step = softplus(a.to(tl.float32) + dt_bias)
    if HIGH > 0:
        step = tl.minimum(tl.maximum(step, LOW), HIGH)
    return rate * step, step


@triton.jit
def key_decay(a, a_log, dt_bias, BOUND: tl.constexpr):
    """Return g of each key in fp32 from raw `a`."""
    raw, rate = a.to(tl.float32) + dt_bias, tl.exp(a_log)
    return -rate * softplus(raw) if BOUND == 0 else BOUND * sigmoid(rate * raw)


@triton.jit
def weight(b, DOUBLE_BETA: tl.constexpr):
    """Return beta in fp32 from raw `b`."""
    beta = sigmoid(b.to(tl.float32))
    return beta * 2.0 if DOUBLE_BETA else beta


@triton.jit
def head_tile(HEADS: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return what this program computes: (tile of BLOCK_V value rows, head, row or segment)."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    return pid % TILES, (pid // TILES) % HEADS, pid // (TILES * HEADS)


def sizes(spec: Recurrence) -> dict[str, int]:
    """Return the head counts and dims under the kernels' argument names."""
    return {"H": spec.num_k_heads, "HV": spec.num_v_heads, "K": spec.key_dim, "V": spec.value_dim}


def key_block(spec: Recurrence) -> int:
    """Return the number of keys in a block of the step kernels, at least 64.

    Each lane of a warp then holds two or more keys. With one key per lane, the lanes' copies of a sum could differ in
    their last bits, and a draft's record holds the copy of one lane."""
    return max(64, int(next_power_of_2(spec.key_dim)))


def described(inputs: RecurrenceInputs, params: RecurrenceParams) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the tensors (mixed, a, b, A_log, dt_bias) and the scalar options under the kernels' argument names.

    The options are strides, scale, sizes and the form of the gates. Without the delta rule `a` stands in for `b`, which
    the kernels then do not read. HIGH = 0 means that steps are not clamped."""
    (mixed, a, b), spec = inputs, params.spec
    assert b is not None or not spec.delta, "the delta rule needs b"
    if b is None:
        b = a
    assert mixed.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1, "rows must be dense"
    strides = {"mixed_stride": mixed.stride(0), "a_stride": a.stride(0), "b_stride": b.stride(0)}
    low, high = (0.0, 0.0) if spec.step_limit == (0.0, math.inf) else spec.step_limit
    modes = {"DELTA": spec.delta, "DOUBLE_BETA": spec.double_beta, "LOW": low, "HIGH": high}
    options = {**strides, "scale": spec.key_dim**-0.5, **sizes(spec), **modes}
    return [mixed, a, b, params.A_log, params.dt_bias], options


def no_tokens(pool: Tensor, records: Records) -> tuple[RecurrenceInputs, RecurrenceParams]:
    """Return empty inputs and parameters that fit `records`, for launches that only fold."""
    (num_v_heads, value_dim), (num_k_heads, key_dim) = records[0].shape[2:], records[1].shape[2:]
    spec = Recurrence(num_k_heads, num_v_heads, key_dim, value_dim, per_key=records[-1].dim() > 3)
    none = pool.new_empty(0, 1)
    return RecurrenceInputs(none, none, none), RecurrenceParams(spec, none, none)


def result(inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, out: Out = None) -> Tensor:
    """Return the output tensor `[T, HV, V]`: `out`, or a new one. It and each slot of the pool must be dense."""
    assert pool[0].is_contiguous(), f"a slot must be dense; pool strides are {pool.stride()}"
    if out is None:
        out = inputs.mixed.new_empty(inputs.mixed.shape[0], params.spec.num_v_heads, params.spec.value_dim)
    assert out.is_contiguous(), "the result must be dense"
    return out

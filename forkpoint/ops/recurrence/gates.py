"""What the Triton kernels of recurrences share."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid, softplus
from forkpoint.ops.parameters import Recurrence, RecurrenceInputs

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def decay(a, a_log, dt_bias, LOW: tl.constexpr, HIGH: tl.constexpr):
    """(g, step) in fp32 of raw `a`."""
    rate = -tl.exp(a_log)
    step = softplus(a.to(tl.float32) + dt_bias)
    if HIGH > 0:
        step = tl.minimum(tl.maximum(step, LOW), HIGH)
    return rate * step, step


@triton.jit
def key_decay(a, a_log, dt_bias, BOUND: tl.constexpr):
    """g of each key in fp32 of raw `a`."""
    raw, rate = a.to(tl.float32) + dt_bias, tl.exp(a_log)
    return -rate * softplus(raw) if BOUND == 0 else BOUND * sigmoid(rate * raw)


@triton.jit
def weight(b, DOUBLE_BETA: tl.constexpr):
    """beta in fp32 of raw `b`."""
    beta = sigmoid(b.to(tl.float32))
    return beta * 2.0 if DOUBLE_BETA else beta


def sizes(spec: Recurrence) -> dict[str, int]:
    """Of heads, as the kernels name them."""
    return {"H": spec.num_k_heads, "HV": spec.num_v_heads, "K": spec.key_dim, "V": spec.value_dim}


def key_block(spec: Recurrence) -> int:
    """Keys of a block of the steps' kernels. Each lane of a warp gets two or more: of a sum over one for each lane the
    last bits would differ from lane to lane, and what a draft leaves behind holds those of one."""
    return max(64, int(triton.next_power_of_2(spec.key_dim)))


def modes(spec: Recurrence) -> dict[str, Any]:
    """How gates are made; a HIGH of 0 is no limit."""
    limited = spec.step_limit != (0.0, math.inf)
    low, high = spec.step_limit if limited else (0.0, 0.0)
    return {"DELTA": spec.delta, "DOUBLE_BETA": spec.double_beta, "LOW": low, "HIGH": high}


def checked(
    spec: Recurrence, inputs: RecurrenceInputs, pool: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mixed, a, b or what kernels that read none are given; the result `[T, HV, V]`, new if there is none).

    Rows of the inputs, slots of the pool and the result must be dense.
    """
    mixed, a, b = inputs
    assert b is not None or not spec.delta, "the delta rule needs b"
    b = a if b is None else b
    assert mixed.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1, "rows must be dense"
    assert pool[0].is_contiguous(), f"a slot must be dense; pool strides are {pool.stride()}"
    if out is None:
        out = mixed.new_empty(mixed.shape[0], spec.num_v_heads, spec.value_dim)
    assert out.is_contiguous(), "the result must be dense"
    return mixed, a, b, out

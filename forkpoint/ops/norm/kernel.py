"""Root-mean-square norms in Triton. A row is reduced in one tile of fixed width, so its bits never depend on the
batch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid as sigmoid_of
from forkpoint.ops.activation.kernel import silu
from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.linear.fp8_kernel import Rounded, store_narrowed, written_beside
from forkpoint.ops.linear.parts_kernel import sum_of_parts
from forkpoint.ops.linear.scaled import BLOCK
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.unmade import Parts

TILE = 1024  # elements per program, unless one row is wider
FLAGS = ("GATED", "GATE_FIRST", "SIGMOID", "ADD")
PIECE = tl.constexpr(BLOCK)  # elements that share an FP8 scale


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    shares,
    other,
    weight,
    out,
    codes,
    scales,
    padded_rows,
    num_rows,
    heads,
    x_token,
    x_head,
    x_part,
    other_token,
    other_head,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise one or more rows.

    `other` is the gate (GATED) or the residual, which is also written (ADD). OWN_WEIGHTS: each head has its own weight.
    Gate and residual are older than x, so they are read while the launch that writes x still runs. PARTS > 0: x is the
    sum of PARTS partial sums, one row per program. With `codes`, all heads of a token are also written in FP8."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    if STRAIGHT:  # a program computes rows of one token
        parts = tl.cdiv(heads, ROWS)
        head, at = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        inside = (head < heads)[:, None] & (at < D)[None, :]
        token = (tl.program_id(0) // parts).to(tl.int64)
        row = token * heads + head
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = tl.arange(0, BLOCK_D)
        inside = (row < num_rows)[:, None] & (at < D)[None, :]
        token, head = (row // heads).to(tl.int64), row % heads
    beside = other + (token * other_token + head * other_head)[:, None] + at[None, :]
    if OWN_WEIGHTS:
        factor = tl.load(weight + (head * D)[:, None] + at[None, :], mask=inside, other=0.0)
    else:
        factor = tl.load(weight + at, mask=at < D, other=0.0)[None, :]
    if ADD or GATED:
        side = tl.load(beside, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    x_at = x + (token * x_token + head * x_head)[:, None] + at[None, :]
    if PARTS:
        if shares is not None:
            shares += tl.program_id(0).to(tl.int64) * PARTS
        wide = sum_of_parts(x_at, shares, x_part, inside, other.dtype.element_ty, PARTS)
    else:
        wide = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + side).to(other.dtype.element_ty)
        tl.store(beside, total, mask=inside)
        wide = total.to(tl.float32)
    if GATE_FIRST:
        wide *= sigmoid_of(side) if SIGMOID else silu(side)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    normed = wide * scale[:, None] * factor
    if GATED and not GATE_FIRST:
        normed *= sigmoid_of(side) if SIGMOID else silu(side)
    normed = normed.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * D + at[None, :], normed, mask=inside)
    if codes is not None:
        SIDE: tl.constexpr = BLOCK_D // PIECE
        block = tl.arange(0, ROWS * SIDE)
        row, part = tl.program_id(0) * ROWS + block // SIDE, block % SIDE
        piece, there = row % heads * (D // PIECE) + part, (row < num_rows) & (part < D // PIECE)
        value = tl.reshape(normed.to(tl.float32), (ROWS * SIDE, PIECE))
        store_narrowed(value, codes, scales, row // heads, piece, there, heads * D, padded_rows)


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides (of a token, of a head) of `[T, D]` or `[T, heads, D]`, whose last dim is dense."""
    assert x.stride(-1) == 1, f"the last dim must be dense; strides are {x.stride()}"
    return (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), 0)


def _norm(x: Tensor, other: Tensor | None, weight: Tensor, eps: float, rounded: bool, **flags: bool) -> Tensor:
    """Launch the kernel and return the norm's output, with FP8 codes if `rounded`; `flags` are the kernel's options."""
    shares, num_parts, part_stride = None, 0, 0
    like = x
    if isinstance(x, Parts):
        assert other is not None and "ADD" in flags, "a norm takes parts if it adds"
        shares, like, (_, num_parts, _), part_stride = x.shares, other, x.own.shape, x.own.stride(1)
        x = x.own[:, 0]
    out = Rounded.room(*like.shape, like=like, rounded=rounded)
    form = straight(x.device)
    if form["STRAIGHT"] and x.dim() == 2:  # the rows of a matrix are heads of one token
        x, other = x[None], None if other is None else other[None]
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * heads
    if num_rows:
        block = next_power_of_2(size)
        rows = max(1, TILE // block) if num_parts == 0 else 1
        programs = x.shape[0] * ceil_div(heads, rows) if form["STRAIGHT"] else ceil_div(num_rows, rows)
        beside = x if other is None else other
        form |= {**dict.fromkeys(FLAGS, False), **flags, "OWN_WEIGHTS": weight.dim() == 2}
        sizes = {"D": size, "ROWS": rows, "PARTS": num_parts}
        operands = (x, shares, beside, weight, out, *written_beside(out))
        strides = (*_strides(x), part_stride, *_strides(beside))
        options = {"num_warps": 8 if block > 2048 or num_parts else 4, **overlap(x.device, x.shape[0])}
        _norm_kernel[(programs,)](*operands, num_rows, heads, *strides, eps, **sizes, **form, **options)
    return out


def rmsnorm(x: Tensor, weight: Tensor, eps: float, rounded: bool = False) -> Tensor:
    """Normalise the last dim of `x[T, D]` or `x[T, heads, D]` with `weight[D]` fp32; return x's dtype.

    With `rounded`, the result also carries its FP8 form for products."""
    return _norm(x, None, weight, eps, rounded)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Add x, which may be `Parts`, to the residual in place; return (norm of the residual, residual)."""
    return _norm(x, residual, weight, eps, rounded, ADD=True), residual


def gated_rmsnorm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
    rounded: bool = False,
) -> Tensor:
    """Return `rmsnorm(x) * weight * silu(gate)` over the last dim of `[T, HV, V]`, in x's dtype.

    `table.GatedRMSNorm` says what `gate_first` and `sigmoid` change. With `rounded`, it also carries its FP8 form.
    """
    return _norm(x, gate, weight, eps, rounded, GATED=True, GATE_FIRST=gate_first, SIGMOID=sigmoid)

"""Routed experts in Triton. reference.py has the formula."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.launch import AT_ONCE, await_before, overlap, start_next
from forkpoint.ops.linear.fp8_kernel import Activations
from forkpoint.ops.linear.kernel import launch_product, launch_rows
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.linear.scaled import BLOCK as SCALE_BLOCK
from forkpoint.ops.linear.scaled import ScaledExperts
from forkpoint.ops.linear.sums_kernel import SCALE_WIDTH, matrix_parts, scale_columns, scale_options, widened
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.moe.order_kernel import ExpertOrder, order_by_expert
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.rounding import ceil_div
from forkpoint.ops.unmade import Parts
from forkpoint.platforms.table import traits_of

PAIR_IN = Tile(1, 8, 128, 1, 6)
UNORDERED_TOKENS = 16  # tokens; up to here a tile may hold them all, and programs find the pairs of their expert
PAIR_OUT = Tile(1, 4, 512, 1, 1)
WIDE_PAIR_OUT = Tile(1, 2, 1024, 4, 1)  # for bfloat16 experts with more than 512 inner columns
# A program loads all its weights before it waits for the previous launch, if there are at most so many tokens and the
# weights are at most so many bytes for each thread.
FEW_TOKENS, MOST_HELD_BYTES = 2, 640


@triton.jit
def _down_tile(down, row, outputs, inside, k, columns, INNER: tl.constexpr):
    at = (row + outputs)[:, None] * INNER + k + columns[None, :]
    return tl.load(down + at, mask=inside[:, None] & (columns < INNER - k)[None, :], other=0.0)


@triton.jit
def _pair_out_kernel(
    hidden,
    down,
    ids,
    weights,
    out,
    size,
    pieces,
    scales,
    INNER: tl.constexpr,
    CHOICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute OUTPUTS outputs of a token: the weighted sum of those of its experts.

    If OVERLAP is AT_ONCE, all weights are loaded before the wait. The previous launch has waited for the ids."""
    pid = tl.program_id(0)
    token = (pid // pieces).to(tl.int64)
    start = pid % pieces * OUTPUTS
    outputs = tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    inside = outputs < size - start
    acc = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    if OVERLAP == AT_ONCE:
        loaded = ()
        for choice in tl.static_range(CHOICES):
            row = tl.load(ids + token * CHOICES + choice).to(tl.int64) * size + start
            for k in tl.static_range(0, INNER, WIDTH):
                tile = _down_tile(down, row, outputs, inside, k, columns, INNER)
                loaded = loaded + (tile,)  # type: ignore[assignment] # noqa: RUF005 (Triton has no other form)
    await_before(OVERLAP)
    # Unrolled, so that the loads of different experts are in flight together.
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        weight = tl.load(weights + pair)
        matrix = tl.load(ids + pair).to(tl.int64)
        row = matrix * size + start
        if SCALE_ROWS and not BLOCKED:
            row_scales = tl.load(scales + row + outputs, mask=inside, other=0.0)
        for k in tl.static_range(0, INNER, WIDTH):
            left = columns < INNER - k
            value = tl.load(hidden + pair * INNER + k + columns, mask=left, other=0.0).to(tl.float32) * weight
            if BLOCKED:
                scale_row = matrix * tl.cdiv(size, SCALE_ROWS) + start // SCALE_ROWS
                scale_at = scale_row * scale_columns(INNER, True) + (k + columns) // SCALE_WIDTH
                value *= tl.load(scales + scale_at, mask=left, other=0.0)
            if OVERLAP == AT_ONCE:
                tile = loaded[choice * ((INNER + WIDTH - 1) // WIDTH) + k // WIDTH]
            else:
                tile = _down_tile(down, row, outputs, inside, k, columns, INNER)
            tile = widened(tile, tl.float32, False) * value[None, :]
            acc += tile * row_scales[:, None] if SCALE_ROWS and not BLOCKED else tile
    start_next(OVERLAP)
    tl.store(out + token * size + start + outputs, tl.sum(acc, 1).to(out.dtype.element_ty), mask=inside)


def grouped_experts(
    x: Tensor,
    packed: PackedExperts | ScaledExperts,
    weights: Tensor,
    ids: Tensor,
    into: Tile,
    out_of: Tile,
    parts: bool = False,
    limits: GateLimits | None = None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, in tiles of the pairs of an expert.

    Pairs are sorted by expert first, unless a tile has room for all tokens. With `parts`, the outputs of a token's
    experts are returned as `Parts`. `into.rows` equals `out_of.rows`. A row's bits depend only on the tiles, which may
    also round activations to FP8. `limits`: see `silu_mul`.
    """
    num_tokens, top_k = ids.shape
    num_experts, size, inner = packed.down.shape
    masks_gathers = traits_of(x.device).masks_gathers
    order: ExpertOrder | None = None
    by: tuple[Tensor, Tensor | None] = (ids, None)
    num_tiles = ids.numel()
    if num_tokens > min(into.rows, UNORDERED_TOKENS) or not masks_gathers:
        order = order_by_expert(ids, num_experts, into.rows)
        by, num_tiles = (order.pairs, order.tiles), order.tiles.shape[1]
    if not masks_gathers:  # gathered rows must consist of whole steps
        x = F.pad(x, (0, -size % into.width))
    cut = (num_tiles, top_k, 1, 0)
    hidden = Activations.empty(ids.numel(), inner, x, into.narrows and into.outputs == SCALE_BLOCK)
    answers = Activations.empty(ids.numel(), size, x, False)
    near, given = overlap(x.device, num_tokens, at_once=True), Activations.of(x, into.narrows)
    gates: dict[str, Any] = {"gated": packed.gated, "squared": not packed.gated, "limits": limits}
    launch_product(given, packed.gate_up, hidden, into, near, cut, order=by, **gates)
    if out_of.narrows and hidden.scales is None:
        hidden = Activations.of(hidden.rows, True)
    launch_product(hidden, packed.down, answers, out_of, overlap(x.device, num_tokens), cut, order=by)
    return _combined(answers.rows, weights, x.dtype, parts)


def takes_warps(packed: ScaledExperts) -> bool:
    """Return whether `warps_experts` supports these experts."""
    size, inner = packed.down.shape[1:]
    blocks = all(weight.by_block and weight.rows == SCALE_BLOCK for weight in packed)
    whole = size % (2 * SCALE_BLOCK) == 0 and inner % SCALE_BLOCK == 0
    return traits_of(packed.down.codes.device).has_warpgroups and packed.gated and blocks and whole


def warps_experts(
    x: Tensor, packed: ScaledExperts, weights: Tensor, ids: Tensor, parts: bool, limits: GateLimits | None = None
) -> Tensor:
    """Return what `grouped_experts` does, with FP8 activations, by groups of warps on a Hopper GPU."""
    # imported late, because not every Triton has Gluon
    from forkpoint.ops.moe.warps_kernel import TILE, multiply_experts

    num_experts, size, inner = packed.down.shape
    order, given = order_by_expert(ids, num_experts, TILE.value), Activations.of(x, True)
    hidden = Activations.empty(ids.numel(), inner, x, True)
    answers = Activations.empty(ids.numel(), size, x, False)
    near = overlap(x.device, len(x))
    multiply_experts(given, packed.gate_up, hidden, order, near, gated=True, choices=ids.shape[1], limits=limits)
    multiply_experts(hidden, packed.down, answers, order, near)
    return _combined(answers.rows, weights, x.dtype, parts)


def _combined(answers: Tensor, weights: Tensor, dtype: torch.dtype, parts: bool) -> Tensor:
    """Return the weighted sums of a token's `answers[T * C, K]`, made now or (`parts`) by whoever reads them."""
    num_tokens, top_k = weights.shape
    left = Parts.of(answers.view(num_tokens, top_k, -1), weights)
    return left if parts else make(left, None, answers.new_empty(num_tokens, answers.shape[1], dtype=dtype))


def paired_experts(
    x: Tensor, packed: PackedExperts | ScaledExperts, weights: Tensor, ids: Tensor, limits: GateLimits | None = None
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, computed pair by pair.

    That is for so few pairs that hardly two share an expert. `limits`: see `silu_mul`.
    """
    num_tokens, top_k = ids.shape
    _, size, inner = packed.down.shape
    hidden = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    down, down_scales = matrix_parts(packed.down)
    out_of = WIDE_PAIR_OUT if down_scales is None and inner > PAIR_OUT.width else PAIR_OUT
    num_threads = 32 * out_of.num_warps
    held_bytes = top_k * out_of.outputs * inner * down.element_size() // num_threads
    at_once = num_tokens <= FEW_TOKENS and held_bytes <= MOST_HELD_BYTES
    options = overlap(x.device, num_tokens, at_once=at_once)
    gates: dict[str, Any] = {"gated": packed.gated, "squared": not packed.gated, "limits": limits}
    launch_rows(x, packed.gate_up, hidden, PAIR_IN, options, ids=ids, **gates)
    pieces = ceil_div(size, out_of.outputs)
    operands = (hidden, down, ids, weights, out)
    sizes = {"INNER": inner, "CHOICES": top_k, **out_of.sizes, **scale_options(packed.down), **options}
    _pair_out_kernel[(num_tokens * pieces,)](*operands, size, pieces, down_scales, **sizes)
    return out

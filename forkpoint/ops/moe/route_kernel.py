"""The choice of experts in Triton. reference.py has the rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid
from forkpoint.ops.launch import await_inputs, overlap, straight
from forkpoint.ops.linear.parts_kernel import sum_of_parts
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.rounding import next_power_of_2
from forkpoint.ops.unmade import Parts


@triton.jit
def _one_of(best, count, STRAIGHT: tl.constexpr):
    """Clamp an index of a maximum to the experts. With NaN scores it may lie past the last, or on an NPU before the
    first."""
    best = tl.minimum(best, count - 1)
    return tl.maximum(best, 0) if STRAIGHT else best


@triton.jit
def _scores(row, part_stride, experts, num_experts, PARTS: tl.constexpr):
    """Load the scores of all experts in fp32. Padding never exceeds a score."""
    there = experts < num_experts
    if PARTS:  # the scores are sums of bfloat16 products
        score = sum_of_parts(row + experts, None, part_stride, there, tl.bfloat16, PARTS)
        return tl.where(there, score, float("-inf"))
    else:
        return tl.load(row + experts, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def _route_kernel(
    scores,
    bias,
    weights,
    ids,
    stride,
    part_stride,
    num_experts,
    top_k,
    num_choices,
    num_groups,
    top_groups,
    eps,
    scale,
    PARTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    STRAIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    nothing = float("-inf")
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    there = experts < num_experts
    score = _scores(scores + row * stride, part_stride, experts, num_experts, PARTS)
    if SIGMOID:
        share = sigmoid(score)
    else:
        share = tl.exp(score - tl.max(score, 0))
        share = share / tl.sum(share, 0)
    rank = share
    if bias is not None:
        rank += tl.load(bias + experts, mask=there, other=0.0)
    rank = tl.where(there, rank, nothing)
    if GROUPS > 1:
        groups = tl.arange(0, GROUPS)
        member = (experts // (num_experts // num_groups))[None, :] == groups[:, None]
        own = tl.where(member, rank[None, :], nothing)
        first = experts[None, :] == tl.argmax(own, 1)[:, None]
        worth = tl.max(own, 1) + tl.max(tl.where(first, nothing, own), 1)
        worth = tl.where(groups < num_groups, worth, nothing)
        kept = groups < 0
        for _ in range(top_groups):
            best = groups == tl.argmax(worth, 0)
            kept = kept | best
            worth = tl.where(best, nothing, worth)
        allowed = tl.sum((member & kept[:, None]).to(tl.int32), 0) > 0
        rank = tl.where(allowed, rank, nothing)
    weight = tl.zeros((CHOICES,), tl.float32)
    chosen = tl.zeros((CHOICES,), tl.int32)
    for choice in range(top_k):
        largest, best = tl.max(rank, 0, return_indices=True)
        if bias is not None or GROUPS > 1:
            largest = tl.sum(tl.where(experts == best, share, 0.0), 0)
        weight = tl.where(choices == choice, largest, weight)
        # NaN shares must not name an expert that does not exist.
        chosen = tl.where(choices == choice, _one_of(best, num_experts, STRAIGHT), chosen)
        rank = tl.where(experts == best, nothing, rank)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + eps)
    weight = weight * scale
    weight = tl.where(choices < top_k, weight, 1.0)
    if GATED:
        gate = _scores(scores + row * stride + num_experts, part_stride, tl.arange(0, 1), 1, PARTS)
        weight = tl.where(choices < top_k, weight, sigmoid(gate))
    chosen = tl.where(choices < top_k, chosen, num_experts + choices - top_k)
    at = row * num_choices + choices
    tl.store(weights + at, weight, mask=choices < num_choices)
    tl.store(ids + at, chosen, mask=choices < num_choices)


def route(scores: Tensor, rule: RouteRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by `rule`; return weights fp32 and ids int32 (`table.Route`).

    The scores may be `Parts`.
    """
    gated, part_stride, num_parts = rule.shared == "gated", 0, 0
    if isinstance(scores, Parts):
        num_parts, part_stride, scores = scores.own.shape[1], scores.own.stride(1), scores.own[:, 0]
    num_tokens, num_experts = scores.shape[0], scores.shape[1] - gated
    num_choices = rule.top_k + rule.num_shared
    weights = torch.empty(num_tokens, num_choices, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_tokens, num_choices, dtype=torch.int32, device=scores.device)
    if not num_tokens:
        return weights, ids
    operands, strides = (scores, bias, weights, ids), (scores.stride(0), part_stride)
    counts = (num_experts, rule.top_k, num_choices, rule.groups, rule.top_groups)
    wide = {"GROUPS": rule.groups, "EXPERTS": num_experts, "CHOICES": num_choices}
    sizes = {name: next_power_of_2(size) for name, size in wide.items()}
    form = {"SIGMOID": rule.score == "sigmoid", "NORMALISE": rule.normalise, "GATED": gated, **straight(scores.device)}
    options = {"PARTS": num_parts, "num_warps": 1, **overlap(scores.device, num_tokens)}
    _route_kernel[(num_tokens,)](*operands, *strides, *counts, rule.eps, rule.scale, **sizes, **form, **options)
    return weights, ids

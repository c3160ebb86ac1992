"""Routed experts in torch: tokens grouped by expert, one pair of products per expert that is hit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import relu_squared, sigmoid, silu_mul
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.scaled import Matrix, dense
from forkpoint.ops.parameters import GateLimits, RouteRule


class PackedExperts(NamedTuple):
    """Expert weights as loaded: `gate_up[E, 2I, H]` (gate rows first), or `[E, I, H]` without gates, and `down[E, H,
    I]`."""

    gate_up: Tensor
    down: Tensor

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] != self.down.shape[2]


def prepare_experts(gate_up: Matrix, down: Matrix) -> PackedExperts:
    """Keep the weights as they are, or widen them from FP8. torch needs no packing."""
    return PackedExperts(dense(gate_up), dense(down))


def route(scores: Tensor, rule: RouteRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by `rule`; return weights fp32 and ids int32 (`table.Route`)."""
    gated = rule.shared == "gated"
    num_tokens, num_experts = scores.shape[0], scores.shape[1] - gated
    own = scores[:, :num_experts]
    shares = torch.softmax(own, dim=-1, dtype=torch.float32) if rule.score == "softmax" else sigmoid(own.float())
    ranks = shares if bias is None else shares + bias
    if rule.groups > 1:
        groups = ranks.view(num_tokens, rule.groups, num_experts // rule.groups)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranks = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
    ids = ranks.topk(rule.top_k, dim=-1).indices
    weights = shares.gather(-1, ids)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.eps)
    weights = weights * rule.scale
    shared = torch.arange(num_experts, num_experts + rule.num_shared, dtype=torch.int32, device=scores.device)
    gate = sigmoid(scores[:, -1:].float()) if gated else torch.ones_like(weights[:, :1])
    return (
        torch.cat((weights, gate.expand(num_tokens, rule.num_shared)), dim=-1),
        torch.cat((ids.int(), shared.expand(num_tokens, rule.num_shared)), dim=-1),
    )


def experts_by(
    product: Callable[[Tensor, PackedLinear], Tensor],
    x: Tensor,
    packed: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    limits: GateLimits | None = None,
) -> Tensor:
    """Return `sum_j weights[t, j] * expert_{ids[t, j]}(x[t])` for `x[T, H]`, `weights` and `ids` `[T, top_k]`.

    `product(x, packed)` computes every matrix product, so a row's bits are as fixed as those of `product`. `limits`:
    see `silu_mul`.
    """
    activate = partial(silu_mul, limits=limits) if packed.gated else relu_squared

    def run(expert: int, rows: Tensor) -> Tensor:
        hidden = activate(product(rows, PackedLinear(packed.gate_up[expert], None)))
        return product(hidden, PackedLinear(packed.down[expert], None))

    num_tokens, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=len(packed.down)).tolist()
    parts, start = list[Tensor](), 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(run(expert, x[order[start : start + count] // top_k]))
            start += count
    found = torch.cat(parts)
    answers = torch.empty_like(found)
    answers[order] = found
    # Add in the order of the routing, so that the bits do not depend on the batch.
    by_choice = answers.view(num_tokens, top_k, -1).float() * weights.float().unsqueeze(-1)
    total = by_choice[:, 0].clone()
    for j in range(1, top_k):
        total += by_choice[:, j]
    return total.to(x.dtype)

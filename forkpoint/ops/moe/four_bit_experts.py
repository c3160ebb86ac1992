"""Routed experts with weights in 4 bits, of Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.activation.kernel import silu_mul
from forkpoint.ops.activation.reference import relu_squared
from forkpoint.ops.linear.packed import FourBitExperts
from forkpoint.ops.linear.packed_kernel import FEW_OF_EXPERTS, MANY, multiply_experts
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.moe.order_kernel import order_by_expert
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.unmade import Parts


def four_bit_experts(
    x: Tensor,
    packed: FourBitExperts,
    weights: Tensor,
    ids: Tensor,
    parts: bool = False,
    limits: GateLimits | None = None,
) -> Tensor:
    """Return each token's weighted sum of experts in 4 bits, with pairs sorted by expert, in tiles.

    With `parts`, the outputs of a token's experts are returned as `Parts`. `limits`: see `silu_mul`.
    """
    num_tokens, top_k = ids.shape
    num_experts, size, _ = packed.down.shape
    tile = FEW_OF_EXPERTS if ids.numel() <= FEW_OF_EXPERTS.rows * num_experts else MANY
    order = order_by_expert(ids, num_experts, tile.rows)
    hidden = multiply_experts(x, packed.gate_up, order, top_k, tile, into=True)
    hidden = silu_mul(hidden, limits=limits) if packed.gated else relu_squared(hidden)
    answers = multiply_experts(hidden, packed.down, order, top_k, tile, into=False)
    left = Parts.of(answers.view(num_tokens, top_k, size), weights)
    return left if parts else make(left, None, torch.empty(num_tokens, size, dtype=x.dtype, device=x.device))

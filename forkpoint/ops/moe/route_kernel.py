"""The choice of experts in Triton; see reference.py for what it computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.activation.kernel import sigmoid
from forkpoint.ops.launch import await_inputs, overlap


@triton.jit
def _route_kernel(
    scores,
    weights,
    ids,
    stride,
    num_experts,
    top_k,
    num_choices,
    NORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    score = tl.load(scores + row * stride + experts, mask=experts < num_experts, other=float("-inf")).to(tl.float32)
    share = tl.exp(score - tl.max(score, 0))
    share = share / tl.sum(share, 0)
    weight = tl.zeros((CHOICES,), tl.float32)
    chosen = tl.zeros((CHOICES,), tl.int32)
    for choice in range(top_k):
        best = tl.argmax(share, 0)
        weight = tl.where(choices == choice, tl.max(share, 0), weight)
        # Shares that are not numbers must not name an expert that is not there.
        chosen = tl.where(choices == choice, tl.minimum(best, num_experts - 1), chosen)
        share = tl.where(experts == best, -1.0, share)
    if NORMALISE:
        weight = weight / tl.sum(weight, 0)
    gate = tl.load(scores + row * stride + num_experts).to(tl.float32)
    weight = tl.where(choices < top_k, weight, sigmoid(gate))
    chosen = tl.where(choices < top_k, chosen, num_experts + choices - top_k)
    at = row * num_choices + choices
    tl.store(weights + at, weight, mask=choices < num_choices)
    tl.store(ids + at, chosen, mask=choices < num_choices)


def route(scores: Tensor, top_k: int, normalise: bool, num_shared: int) -> tuple[Tensor, Tensor]:
    """`scores[T, E + 1] -> weights[T, top_k + num_shared]` fp32, `ids` int32."""
    num_tokens, num_scores = scores.shape
    num_choices = top_k + num_shared
    weights = torch.empty(num_tokens, num_choices, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_tokens, num_choices, dtype=torch.int32, device=scores.device)
    sizes = {
        "EXPERTS": triton.next_power_of_2(num_scores - 1),
        "CHOICES": triton.next_power_of_2(num_choices),
    }
    if num_tokens:
        _route_kernel[(num_tokens,)](
            scores,
            weights,
            ids,
            scores.stride(0),
            num_scores - 1,
            top_k,
            num_choices,
            NORMALISE=normalise,
            **sizes,
            num_warps=1,
            **overlap(scores.device, num_tokens),
        )
    return weights, ids

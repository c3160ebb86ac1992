"""A sparse MLP: routed experts and one shared expert behind a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forkpoint.models.layers import MLP, Build, Projection
from forkpoint.models.weights import join_rows
from forkpoint.ops.activation.reference import sigmoid


class SparseMLP:
    """`sum_j p_j expert_j(x) + sigmoid(g(x)) shared(x)` over the `top_k` likeliest experts of each token."""

    def __init__(self, build: Build, name: str) -> None:
        moe = build.config.moe
        assert moe is not None
        self._ops, self._moe = build.ops, moe
        hidden = build.config.hidden_size
        names = [f"{name}.gate.weight", f"{name}.shared_expert_gate.weight"]
        self._router = Projection(build.ops, join_rows(build.weights, names, [moe.num_experts, 1], hidden))
        self._shared = MLP(build, f"{name}.shared_expert", moe.shared_intermediate_size)
        self._experts: Any = build.ops.prepare_experts(*self._read_experts(build, f"{name}.experts"))

    def _read_experts(self, build: Build, name: str) -> tuple[Tensor, Tensor]:
        """`gate_up[E, 2I, H]`, `down[E, H, I]`, stored whole or expert by expert."""
        count, inner, hidden = self._moe.num_experts, self._moe.intermediate_size, build.config.hidden_size
        source = build.weights
        if source.has(f"{name}.gate_up_proj"):
            gate_up = source.get(f"{name}.gate_up_proj", (count, 2 * inner, hidden))
            return gate_up, source.get(f"{name}.down_proj", (count, hidden, inner))
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=source.dtype)
        down = torch.empty(count, hidden, inner, dtype=source.dtype)
        for e in range(count):
            gate_up[e, :inner] = source.get(f"{name}.{e}.gate_proj.weight", (inner, hidden))
            gate_up[e, inner:] = source.get(f"{name}.{e}.up_proj.weight", (inner, hidden))
            down[e] = source.get(f"{name}.{e}.down_proj.weight", (hidden, inner))
        return gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        """`x[T, H] -> [T, H]`."""
        scores, gate = torch.split(self._router(x), [self._moe.num_experts, 1], dim=-1)
        weights, ids = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(self._moe.top_k, dim=-1)
        if self._moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        routed = self._ops.experts(x, self._experts, weights.to(x.dtype), ids)
        return routed + (self._shared(x).float() * sigmoid(gate.float())).to(x.dtype)

"""What lies between the projection and attention, composed of single operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.ops.parameters import KVScales, QKNorm
from forkpoint.ops.table import RMSNorm


@dataclass(frozen=True, slots=True)
class ComposedInputs:
    """`qk_norm_rope_write` by a norm, a rotation (may be in place) and a write of keys and values."""

    rmsnorm: RMSNorm
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, KVScales | None], None]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QKNorm | None,
        cos_sin: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        if norm is not None:
            q, k = self.rmsnorm(q, norm.q_weight, norm.eps), self.rmsnorm(k, norm.k_weight, norm.eps)
        if cos_sin is not None:
            q, k = self.rope(q, k, cos_sin, positions)
        self.kv_write(k, v, k_cache, v_cache, slot_mapping, scales)
        return q


@dataclass(frozen=True, slots=True)
class ComposedLatentWrite:
    """`latent_write` by the same operators, and a store of rows."""

    rmsnorm: RMSNorm
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    store: Callable[[Tensor, Tensor, Tensor], None]

    def __call__(
        self,
        q_rope: Tensor,
        latent: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor | None,
        positions: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        normed, key = self.rmsnorm(latent[:, : len(weight)], weight, eps), latent[:, len(weight) :]
        if cos_sin is not None:
            q_rope, key = self.rope(q_rope, key.unsqueeze(1), cos_sin, positions)
            key = key.squeeze(1)
        self.store(torch.cat((normed, key), dim=1).unsqueeze(1), cache, slot_mapping)
        return q_rope

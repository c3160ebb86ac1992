"""The operators between projections and attention, composed of a norm, a rotation (maybe in place) and a write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from forkpoint.ops.parameters import KVScales, QKNorm
from forkpoint.ops.table import RMSNorm

Rope: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operators composed of the given norm, rotation and writes. `store_rows` is `kv_write` of one tensor."""

    rmsnorm: RMSNorm
    rope: Rope
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, KVScales | None], None]
    store_rows: Callable[[Tensor, Tensor, Tensor], None]

    def qk_norm_rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QKNorm | None,
        cos_sin: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        key_places: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v in the caches, return q (`table.QKNormRopeWrite`)."""
        if norm is not None:
            q, k = self.rmsnorm(q, norm.q_weight, norm.eps), self.rmsnorm(k, norm.k_weight, norm.eps)
        if cos_sin is not None:
            q, k = self.rope(q, k, cos_sin, positions)
        self.kv_write(k, v, k_cache, v_cache, key_places, scales)
        return q

    def latent_write(
        self,
        q_rope: Tensor,
        latent: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor | None,
        positions: Tensor,
        cache: Tensor,
        key_places: Tensor,
    ) -> Tensor:
        """Normalise and rotate latents, store them in the cache, return the rotated q (`table.LatentWrite`)."""
        normed, key = self.rmsnorm(latent[:, : len(weight)], weight, eps), latent[:, len(weight) :]
        if cos_sin is not None:
            q_rope, key = self.rope(q_rope, key.unsqueeze(1), cos_sin, positions)
            key = key.squeeze(1)
        self.store_rows(torch.cat((normed, key), dim=1).unsqueeze(1), cache, key_places)
        return q_rope

"""Projected queries, keys and values, and what must become of them, token by token in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.ops.parameters import QKNorm
from forkpoint.ops.table import OpTable
from tests.ops.recurrence_cases import padded_pool


@dataclass(frozen=True)
class InputShape:
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rotary: int  # 0: no rotation
    norm: bool


SHAPES = [
    InputShape(4, 2, 16, 16, 8, True),
    InputShape(3, 1, 24, 40, 24, False),
    InputShape(2, 2, 40, 16, 0, True),
    InputShape(5, 1, 16, 24, 10, True),
    InputShape(2, 1, 16, 16, 0, False),
]


class InputCase:
    """Five tokens, of which the second has no slot, as views of one projection's rows with a gate behind them."""

    def __init__(self, shape: InputShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        torch.manual_seed(0)
        self.shape = s = shape
        widths = [s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.value_dim, s.heads * s.value_dim]
        self._projected, self._widths = (torch.randn(5, sum(widths)) * 2).to(device, dtype), widths
        weights = (torch.rand(2, s.dim) + 0.5).to(device)
        self.norm = QKNorm(weights[0], weights[1], 1e-5) if s.norm else None
        angles = torch.rand(50, s.rotary // 2) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device) if s.rotary else None
        self.positions = torch.tensor([3, 0, 49, 7, 8], device=device)
        self.slots = torch.tensor([70, -1, 2, 255, 128], device=device)
        self._pools = [padded_pool(4, (s.kv_heads, 64, d), dtype) for d in (s.dim, s.value_dim)]
        self._device = device

    def _fresh(self, pool: Tensor) -> Tensor:
        wide = torch.full((pool.shape[0], pool.stride(0)), float("nan"), dtype=pool.dtype, device=self._device)
        return wide[:, 8 : 8 + pool[0].numel()].view(pool.shape).copy_(pool)

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, views of rows that the caller may overwrite."""
        q, k, v, _ = self._projected.clone().split(self._widths, 1)
        dim = self.shape.dim
        return q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, self.shape.value_dim))

    def run(self, ops: OpTable) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, key cache, value cache) by a table's operator, on copies of the inputs."""
        caches = [self._fresh(pool) for pool in self._pools]
        out = ops.qk_norm_rope_write(*self.heads(), self.norm, self.cos_sin, self.positions, *caches, self.slots)
        return out, caches[0], caches[1]

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in fp64."""
        q, k, v = (part.double().cpu() for part in self.heads())
        if self.norm is not None:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() * weight.double().cpu()
                for x, weight in ((q, self.norm.q_weight), (k, self.norm.k_weight))
            )
        q, k = self._rotated(q), self._rotated(k)
        caches = [pool.double() for pool in self._pools]
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                caches[0][slot // 64, :, slot % 64] = k[token]
                caches[1][slot // 64, :, slot % 64] = v[token]
        return q, caches[0], caches[1]

    def _rotated(self, x: Tensor) -> Tensor:
        if self.cos_sin is None:
            return x
        out, half = x.clone(), self.shape.rotary // 2
        for token, position in enumerate(self.positions.tolist()):
            cos, sin = self.cos_sin[position].double().cpu().chunk(2)
            low, high = x[token, :, :half], x[token, :, half : 2 * half]
            out[token, :, :half], out[token, :, half : 2 * half] = low * cos - high * sin, high * cos + low * sin
        return out

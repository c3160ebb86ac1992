"""The gated delta rule over whole rows, differentiable, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64

# (q[B, T, H, K], k[B, T, H, K], v[B, T, HV, V], g[B, T, HV], beta[B, T, HV]) -> [B, T, HV, V].
# Each row starts from the zero state; q and k are normalised already; T is a multiple of CHUNK.
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def torch_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute `S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T`, read by `q_t / sqrt(K)`.

    It works in fp32, one chunk at a time. Inside a chunk the corrections solve one unit triangular system.
    """
    rows, length, _, key_dim = q.shape
    group = v.shape[2] // q.shape[2]
    wide = (q.repeat_interleave(group, 2) * key_dim**-0.5, k.repeat_interleave(group, 2), v)
    q, k, v = (_in_chunks(x) for x in wide)
    g, beta = (_in_chunks(x) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = beta[..., None] * (k @ k.mT) * decay
    scores = (q @ k.mT) * decay
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    sides = torch.cat([beta[..., None] * v, beta[..., None] * from_start * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, reads = solved.split([v.shape[-1], key_dim], dim=-1)
    state = q.new_zeros(rows, v.shape[1], key_dim, v.shape[-1])
    outputs = []
    for i in range(length // CHUNK):
        delta = fresh[:, :, i] - reads[:, :, i] @ state
        outputs.append((from_start * q)[:, :, i] @ state + scores[:, :, i] @ delta)
        state = state * from_start[:, :, i, -1:] + (to_end * k)[:, :, i].mT @ delta
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _in_chunks(x: Tensor) -> Tensor:
    """Return `[B, T, H, ...]` as `[B, H, T / CHUNK, CHUNK, ...]` in fp32."""
    return torch.unflatten(x.float().transpose(1, 2), 2, (-1, CHUNK))


def l2_normalised(x: Tensor) -> Tensor:
    """Return unit vectors along the last dim, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

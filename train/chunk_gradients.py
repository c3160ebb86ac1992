"""The part of the gated delta rule's backward pass that treats each chunk by itself, as batched matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from train.delta_rule import CHUNK


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dv: Tensor, h: Tensor, dh: Tensor, g: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k, the weights that read the state, and the decays.

    `q, k [B, T, H, K]`; `v [B, T, HV, V]` the corrections that each token adds to the state, `do, dv` alike the
    gradients of the outputs and of v; `h, dh [B, T/64, HV, K, V]` the state before each chunk and the gradient of the
    state after it; `g [B, T, HV]` the base-2 logarithm of the decay since the chunk's start, token included.
    -> `dq, dk [B, T, H, K]`, `dw [B, T, HV, K]`, and `dg [B, T, HV]` fp32, of the natural logarithm.
    """
    rows, (num_heads, heads) = q.shape[0], (q.shape[2], v.shape[2])
    queries, keys, fresh, d_out, d_fresh = (_chunked(x, heads) for x in (q, k, v, do, dv.to(v.dtype)))
    sums = _chunked(g[..., None], heads).squeeze(-1)
    h, dh = h.flatten(0, 1).to(v.dtype), dh.flatten(0, 1).to(v.dtype)
    dw = _unchunked(-(d_fresh @ h.mT), rows, heads)
    dq, dk_across, ds = _decayed(d_out @ h.mT, fresh @ dh.mT, d_out @ fresh.mT, sums, scale)
    dq, dk = dq + ds @ keys, dk_across + ds.mT @ queries
    dg = _decay_gradient(dq, dk_across, dk, queries, keys, h, dh, sums)
    dg = dg.transpose(1, 2).reshape(g.shape)
    return _unchunked(dq, rows, num_heads).to(q.dtype), _unchunked(dk, rows, num_heads).to(k.dtype), dw.to(k.dtype), dg


def _chunked(x: Tensor, num_heads: int) -> Tensor:
    """Return `[B, T, H, D]` as `[B * T / 64, HV, 64, D]`, with each head repeated for the value heads that it
    serves."""
    x = x.repeat_interleave(num_heads // x.shape[2], dim=2)
    return torch.unflatten(x, 1, (-1, CHUNK)).flatten(0, 1).transpose(1, 2).contiguous()


def _unchunked(x: Tensor, rows: int, num_heads: int) -> Tensor:
    """Return `[B * T / 64, HV, 64, D]` as `[B, T, H, D]`, summed over the value heads of each head."""
    x = torch.unflatten(x.transpose(1, 2), 2, (num_heads, -1)).sum(3, dtype=torch.float32)
    return x.reshape(rows, -1, num_heads, x.shape[-1])


def _decayed(dq: Tensor, dk: Tensor, ds: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply each part by the decay that it crosses."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    within = torch.exp2((g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf))
    dq = dq.float() * torch.exp2(g)[..., None] * scale
    dk = dk.float() * torch.exp2(g[..., -1:] - g)[..., None]
    return dq, dk, (ds.float() * within * scale).to(ds.dtype)


def _decay_gradient(
    dq: Tensor, dk_across: Tensor, dk: Tensor, q: Tensor, k: Tensor, h: Tensor, dh: Tensor, g: Tensor
) -> Tensor:
    """Return the gradients of the decays.

    Queries gain by their own decay, and keys lose by it. The last token's decay also acts on the state.
    """
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    kept = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(g[..., -1])
    last = kept + (dk_across * k.float()).sum((-1, -2))
    is_last = torch.arange(CHUNK, device=g.device) == CHUNK - 1
    return dg + torch.where(is_last, last[..., None], 0.0)

"""Attention as a plain softmax over each row's own keys, without blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(
    q: Tensor,
    query_lens: Sequence[int],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    window: int | None = None,
    first_key: int = 0,
) -> Tensor:
    """Return `[T, H, DV]` in fp64 from `q[T, H, D]`, and `keys[r][N, KH, D]` and `values[r][N, KH, DV]` of each row.

    A row's `query_lens` queries belong to its last tokens."""
    outputs = []
    for own, k, v in zip(torch.split(q, list(query_lens)), keys, values, strict=True):
        group, at = own.shape[1] // k.shape[1], torch.arange(len(k), device=q.device)
        k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        last = torch.arange(len(k) - len(own), len(k), device=q.device).unsqueeze(1)
        hidden = (at > last) | (at <= last - (window or len(k) + 1)) | (at < first_key)
        scores = torch.einsum("qhd,khd->hqk", own.double(), k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)

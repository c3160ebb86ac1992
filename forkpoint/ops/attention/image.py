"""Attention of an image's patches in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.rope.reference import rotated


def image_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, cos_sin: Tensor | None = None) -> Tensor:
    """Return each patch's attention to all patches: see `table.ImageAttention`."""
    q, k, v = (x.view(len(x), num_heads, -1) for x in (q, k, v))
    if cos_sin is not None:
        cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)

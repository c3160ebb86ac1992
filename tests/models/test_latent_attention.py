"""A layer of latent attention whose long rows attend to what is made of latents, beside one that never makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.indices import attention_index
from forkpoint.models import latent_attention
from forkpoint.models.config import Build
from forkpoint.models.context import ForwardContext
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.weights import DummyWeights
from forkpoint.ops.select import torch_table
from tests.ops.triton_cases import DEVICE, triton_ops

CONFIG = LatentAttentionConfig(num_heads=3, key_dim=24, shared_dim=16, value_dim=20, rank=32)
HIDDEN = 48


@pytest.mark.parametrize(("queries", "lens"), [([1, 9, 70], [66, 75, 130]), ([70], [130])], ids=["mixed", "alone"])
def test_long_rows(queries: list[int], lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "EXPANDED_FROM", 64)
    decodes = queries.count(1)
    table = torch.arange(3 * len(lens), dtype=torch.int32, device=DEVICE).view(len(lens), 3)
    places = [torch.arange(n - q, n) + 192 * r for r, (q, n) in enumerate(zip(queries, lens, strict=True))]
    index = attention_index(queries, lens, table, torch.cat(places).to(DEVICE), decodes)
    before = torch.randn(3 * len(lens), 1, 64, CONFIG.rank + CONFIG.shared_dim).to(DEVICE)
    x, found = torch.randn(sum(queries), HIDDEN).to(DEVICE), []
    for ops in (torch_table(), triton_ops()):
        sizes = cast(Any, SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-6))
        build = Build(sizes, DummyWeights(dtype=torch.float32, seed=0, device=DEVICE), ops)
        positions = torch.zeros(sum(queries), dtype=torch.int64, device=DEVICE)
        ctx = ForwardContext(positions, decodes, index, {}, {}, ({"latent": before.clone()},))
        found.append(CONFIG.build(build, "self_attn", 0)(x, ctx))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)

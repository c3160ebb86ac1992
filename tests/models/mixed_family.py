"""A family whose layers keep all that a layer can: nothing, keys, a state, both at once, a convolution alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec, StateSpec, TensorSpec
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Block, Build, ModelConfig, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import ShortConvConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.kimi_linear import KDAConfig
from forkpoint.models.layers import MLPConfig, read_projection
from forkpoint.models.mamba import MambaConfig
from forkpoint.models.qwen3_next import Qwen35


@dataclass(frozen=True, slots=True)
class EmaConfig(PartConfig):
    """A recurrence of its own, served by operators that no table has: a decaying sum of what was projected."""

    name: str = "ema"

    def build(self, build: Build, name: str, layer: int) -> Block:
        return Ema(build, name, layer)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (StateSpec((TensorSpec("sum", (64,), "float32", ("ema_decode", "ema_prefill")),)),)

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size**2


class Ema:
    def __init__(self, build: Build, name: str, layer: int) -> None:
        hidden = build.config.hidden_size
        self._layer, self._input = layer, read_projection(build, f"{name}.in_proj", hidden, hidden)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        x, pool, split = self._input(x), ctx.caches[self._layer]["sum"], ctx.num_decodes
        rows, segments = ctx.decode["ema_decode"], ctx.prefill["ema_prefill"]
        decoded = [_advance(pool, int(rows.src[row]), int(rows.dst[row]), x[row : row + 1], {}) for row in range(split)]
        prefilled = []
        for n in range(len(segments)):
            start, end = (int(value) + split for value in segments.cu_seqlens[n : n + 2])
            entries = range(int(segments.save_ptr[n]), int(segments.save_ptr[n + 1]))
            saves = {int(segments.save_pos[e]): int(segments.save_dst[e]) for e in entries}
            prefilled.append(_advance(pool, int(segments.src[n]), int(segments.dst[n]), x[start:end], saves))
        return torch.cat([*decoded, *prefilled])


def _advance(pool: Tensor, src: int, dst: int, x: Tensor, saves: dict[int, int]) -> Tensor:
    assert src in (-1, dst), "an operator that no table says to redirect finds its state in place"
    state = pool[src].clone() if src >= 0 else torch.zeros_like(pool[0])
    out = torch.empty_like(x)
    for t, token in enumerate(x):
        state = 0.97 * state + token
        out[t] = state
        if t + 1 in saves:
            pool[saves[t + 1]] = state
    if dst >= 0:
        pool[dst] = state
    return out


@dataclass(frozen=True, slots=True)
class ParallelConfig(PartConfig):
    """Parts that see the same input, and whose outputs are added up."""

    parts: Sequence[PartConfig]
    name: str = "mixer"

    def build(self, build: Build, name: str, layer: int) -> Block:
        blocks = [part.build(build, f"{name}.{part.name}", layer) for part in self.parts]

        def together(x: Tensor, ctx: ForwardContext) -> Tensor:
            return torch.stack([block(x, ctx) for block in blocks]).sum(0)

        return together

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return tuple(spec for part in self.parts for spec in part.kept(dtype, state_dtype))

    def num_weights(self, hidden_size: int) -> int:
        return sum(part.num_weights(hidden_size) for part in self.parts)

    def flops_per_pair(self) -> int:
        return sum(part.flops_per_pair() for part in self.parts)


class Mixed(Model):
    """`MixedForCausalLM`, which only the tests have."""

    architectures: ClassVar = ("MixedForCausalLM",)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        attention, mlp = AttentionConfig.read(fields), MLPConfig.read(fields)
        delta = GDNConfig.read(fields, wide=Qwen35.wide, narrow=Qwen35.narrow)
        scan = MambaConfig(channels=64, values=8, rank=4, conv_width=3, conv_bias=False, bias=False)
        kinds: dict[str, tuple[PartConfig, ...]] = {
            "parallel": (ParallelConfig((attention, delta)), mlp),
            "mlp": (mlp,),
            "conv": (ShortConvConfig(channels=64, width=3), mlp),
            "delta": (delta,),
            "kda": (KDAConfig.of(2, 16, 3), mlp),
            "scan": (ParallelConfig((attention, scan)), mlp),
            "ema": (EmaConfig(), mlp),
            "attention": (attention,),
        }
        types = fields.layer_types(tuple(kinds), lambda i: list(kinds)[i % len(kinds)])
        return ModelConfig.of(fields, [kinds[kind] for kind in types], fields.rotary(attention.head_dim))

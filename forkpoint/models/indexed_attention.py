"""Attention to the keys that an index chooses (Qwen3.8-Flash-Next)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, StateSpec
from forkpoint.models.attention import Attention, AttentionConfig
from forkpoint.models.config import Build
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import WINDOW, LastInputs, kept_inputs
from forkpoint.models.cuts import refuse_context
from forkpoint.models.key_index import IndexConfig, PoolKeys
from forkpoint.models.layers import RMSNorm, read_projection
from forkpoint.models.sums import mean
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.rope.reference import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedAttentionConfig(AttentionConfig):
    """One layer's attention to the keys that its index chooses."""

    index: IndexConfig

    def build(self, build: Build, name: str, layer: int) -> IndexedAttention:
        return IndexedAttention(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        spec = KVSpec.of(self.num_kv_heads, self.head_dim, self.head_dim, dtype, takes_fp8=True)
        index, window = self.index.kept(dtype), kept_inputs(self.index.dim, self.index.rule.size, dtype)
        return replace(spec, tensors=(*spec.tensors, index), exact=(index.name,)), StateSpec((window,))

    def cut(self, ranks: Ranks) -> AttentionConfig:
        refuse_context(ranks)
        return super(IndexedAttentionConfig, self).cut(ranks)

    def num_weights(self, hidden_size: int) -> int:
        own = super(IndexedAttentionConfig, self).num_weights(hidden_size)
        return own + hidden_size * (self.index.num_heads + 1) * self.index.dim

    def flops_per_pair(self) -> int:
        return self.index.flops_per_pair


class MeanIndex:
    """The index of an attention layer. A pool's key is the normalised mean of its tokens' keys, rotated by the position
    of its first token."""

    def __init__(self, build: Build, name: str, layer: int, config: IndexConfig, cos_sin: Tensor) -> None:
        self._config, self._cos_sin, dim = config, cos_sin, config.dim
        self._keys, self._inputs = PoolKeys(build, layer, config.rule), LastInputs(build.state(layer, WINDOW))
        self._project = read_projection(
            build, f"{name}.index_qk_proj", (config.num_heads + 1) * dim, build.config.hidden_size
        )
        self._query_norm, self._key_norm = (RMSNorm(build, f"{name}.{part}_layernorm", dim, True) for part in "qk")

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the tokens' index keys and choose their pools, from hidden states `x[T, H]`."""
        config, size = self._config, self._config.rule.size
        queries, keys = torch.split(self._project(x), [config.num_heads * config.dim, config.dim], dim=1)
        means = mean(self._inputs(keys.contiguous(), ctx))
        first = (ctx.positions - (size - 1)).clamp(min=0)  # of the pool that ends with the token
        own = rotate(self._key_norm(means).unsqueeze(1), self._cos_sin, first)
        self._keys.write(own.squeeze(1), ctx)
        queries = self._query_norm(torch.unflatten(queries, 1, (config.num_heads, -1)).contiguous())
        weights = torch.full((len(x), config.num_heads), config.dim**-0.5, device=x.device)
        return self._keys.choose(rotate(queries, self._cos_sin, ctx.positions), weights, ctx)


class IndexedAttention(Attention):
    """The attention of layer `layer`, with weights packed for its operators."""

    def __init__(self, build: Build, name: str, layer: int, config: IndexedAttentionConfig) -> None:
        super().__init__(build, name, layer, config)
        assert self._table is not None, "attention with an index has rotary positions"
        self._rule = config.index.rule
        self._index = MeanIndex(build, f"{name}.indexer", layer, config.index, self._table)

    def attend(self, x: Tensor, q: Tensor, gate: Tensor | None, ctx: ForwardContext) -> Tensor:
        cache, attend = ctx.caches[self._layer], self._build.ops.pool_attention
        places = (cache["k"], cache["v"], ctx.attention, self._scale, self._index(x, ctx), self._rule)
        return attend(q, *places, gate, KVScales.of(cache))

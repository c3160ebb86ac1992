"""Latent attention to the keys that an index chooses (GLM-5.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, StateSpec, TensorSpec
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext, LayerCache
from forkpoint.models.convolution import WINDOW, LastInputs, kept_inputs
from forkpoint.models.cuts import ROWS, refuse_context, share
from forkpoint.models.key_index import IndexConfig, PoolKeys
from forkpoint.models.latent_attention import read_up
from forkpoint.models.layers import Projection, RMSNorm, RowParallel, read_projection
from forkpoint.models.sums import summed, weighted
from forkpoint.ops.norm.reference import layernorm
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.ranks import Ranks

INDEX_NORM_EPS = 1e-6  # fixed in the architecture


class LatentIndex:
    """The index of a latent attention. A pool's key is the mean of its tokens' keys, weighted by a softmax per dim."""

    def __init__(self, build: Build, name: str, layer: int, config: IndexConfig, query_rank: int) -> None:
        heads, dim, hidden, source = config.num_heads, config.dim, build.config.hidden_size, build.weights
        self._config, self._keys, self._inputs = (
            config,
            PoolKeys(build, layer, config.rule),
            LastInputs(build.state(layer, WINDOW)),
        )
        self._queries = read_projection(build, f"{name}.wq_b", heads * dim, query_rank)
        self._key = read_projection(build, f"{name}.wk", dim, hidden)
        self._gate = Projection(build.ops, source.get_matrix(f"{name}.index_kpool_compress_gate", (dim, hidden)))
        self._weights = read_projection(build, f"{name}.weights_proj", heads, hidden)
        fp32 = torch.float32
        self._norm = source.get(f"{name}.k_norm.weight", (dim,), fp32, (0.9, 1.1))
        self._shift = source.get(f"{name}.k_norm.bias", (dim,), fp32, (-0.1, 0.1))
        self._places = source.get(f"{name}.index_kpool_compress_ape", (config.rule.size, dim), fp32)
        self._scale = heads**-0.5 * dim**-0.5

    def __call__(self, x: Tensor, q: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the tokens' index keys and return their pools, from `x[T, H]` and `q[T, query_rank]`.

        `x` are hidden states, `q` latents of queries.
        """
        keys = layernorm(self._key(x), self._norm, self._shift, INDEX_NORM_EPS)
        self._keys.write(self._pooled(self._inputs(torch.cat((keys, self._gate(x)), dim=1), ctx)), ctx)
        queries = torch.unflatten(self._queries(q), 1, (self._config.num_heads, -1))
        return self._keys.choose(queries, self._weights(x).float() * self._scale, ctx)

    def _pooled(self, inputs: Tensor) -> Tensor:
        """Return the mean `[T, D]` of the keys in `inputs[T, size, 2 D]`, which hold keys and the logits of weights."""
        keys, logits = inputs.float().chunk(2, dim=-1)
        logits = logits + self._places
        shares = torch.exp(logits - logits.amax(1, keepdim=True))
        return (weighted(keys, shares) / summed(shares, 1).squeeze(1)).to(inputs.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatentConfig(PartConfig):
    """One layer's latent attention without positions, to the keys that its index chooses.

    `query_rank` and `rank` are the sizes of the latents of queries, and of keys and values.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    query_rank: int
    rank: int
    index: IndexConfig
    name: str = "self_attn"

    def build(self, build: Build, name: str, layer: int) -> IndexedLatentAttention:
        return IndexedLatentAttention(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        latent, index = TensorSpec("latent", (1, self.rank), dtype), self.index.kept(dtype)
        window = kept_inputs(2 * self.index.dim, self.index.rule.size, dtype)
        return KVSpec((latent, index), takes_fp8=True, exact=(index.name,)), StateSpec((window,))

    def cut(self, ranks: Ranks) -> IndexedLatentConfig:
        refuse_context(ranks)
        return replace(self, num_heads=share(self.num_heads, "heads", ranks))

    def num_weights(self, hidden_size: int) -> int:
        index, dims = self.index, self.key_dim + self.value_dim
        queries = self.query_rank * (hidden_size + self.num_heads * self.key_dim + index.num_heads * index.dim)
        inner = self.rank * (hidden_size + self.num_heads * dims) + self.num_heads * self.value_dim * hidden_size
        return queries + inner + hidden_size * (2 * index.dim + index.num_heads)

    def flops_per_pair(self) -> int:
        return self.index.flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentLatentConfig(IndexedLatentConfig):
    """The attention of an MTP head without its index: to the newest keys, as many as the index would choose.

    Drafts then need neither index keys nor their states. After more tokens they differ from drafts with the index.
    """

    def build(self, build: Build, name: str, layer: int) -> RecentLatentAttention:
        return RecentLatentAttention(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (KVSpec((TensorSpec("latent", (1, self.rank), dtype),), takes_fp8=True),)


# Maps hidden states `[T, H]` and latents of queries to the pools that each token attends to.
Chooser: TypeAlias = Callable[[Tensor, Tensor, ForwardContext], Tensor]


class IndexedLatentAttention:
    """The attention of layer `layer` to the keys that its index chooses, with packed weights."""

    def __init__(self, build: Build, name: str, layer: int, config: IndexedLatentConfig) -> None:
        self._ops, self._layer, self._config = build.ops, layer, config
        hidden, heads, rank = build.config.hidden_size, config.num_heads, config.rank
        self._narrow = read_projection(build, f"{name}.q_a_proj", config.query_rank, hidden)
        self._query_norm = RMSNorm(build, f"{name}.q_a_layernorm", config.query_rank, centred=False)
        self._queries = read_projection(build, f"{name}.q_b_proj", heads * config.key_dim, config.query_rank, cut=ROWS)
        self._latents = read_projection(build, f"{name}.kv_a_proj_with_mqa", rank, hidden)
        self._norm = RMSNorm(build, f"{name}.kv_a_layernorm", rank, centred=False)
        _, self._to_latent, self._from_latent = read_up(build, name, heads, config.key_dim, config.value_dim, rank)
        self._choose = self._chooser(build, f"{name}.indexer", layer)
        self._out = RowParallel(build, f"{name}.o_proj", hidden, heads * config.value_dim)

    def _chooser(self, build: Build, name: str, layer: int) -> Chooser:
        return LatentIndex(build, name, layer, self._config.index, self._config.query_rank)

    def keep(self, x: Tensor, ctx: ForwardContext) -> None:
        """Store the latents of `x[T, H]`."""
        ops, kept, places = self._ops, ctx.caches[self._layer], ctx.attention.key_places
        latents, cache, scales = self._norm(self._latents(x)).unsqueeze(1), kept["latent"], _scales(kept)
        if scales is None:
            ops.store_rows(latents, cache, places)
        else:  # a latent is key and value
            ops.qk_norm_rope_write(latents, latents, latents, None, None, ctx.positions, cache, cache, places, scales)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend: `x[T, H] -> [T, H]`, after storing the tokens' latents and index keys."""
        self.keep(x, ctx)
        ops, config, kept = self._ops, self._config, ctx.caches[self._layer]
        cache, scales = kept["latent"], _scales(kept)
        narrow = self._query_norm(self._narrow(x))
        chosen = self._choose(x, narrow, ctx)
        own = torch.unflatten(self._queries(narrow), 1, (config.num_heads, -1))
        queries, scale = ops.linear_heads(own, self._to_latent), config.key_dim**-0.5
        places = (cache, cache, ctx.attention, scale, chosen, config.index.rule)
        out = ops.pool_attention(queries, *places, scales=scales)
        return self._out(ops.linear_heads(out, self._from_latent).flatten(1))


class RecentLatentAttention(IndexedLatentAttention):
    """The attention of an MTP head to the newest keys."""

    def _chooser(self, build: Build, name: str, layer: int) -> Chooser:
        rule = self._config.index.rule

        def newest(x: Tensor, queries: Tensor, ctx: ForwardContext) -> Tensor:
            complete = (ctx.positions.unsqueeze(1) + 1) // rule.size
            pools = (complete - rule.most).clamp(min=0) + torch.arange(rule.most, device=x.device)
            return torch.where(pools < complete, pools, -1).int()

        return newest


def _scales(kept: LayerCache) -> KVScales | None:
    """Return the scales of latents in 8 bits."""
    return KVScales(kept["latent_scale"], kept["latent_scale"]) if "latent_scale" in kept else None

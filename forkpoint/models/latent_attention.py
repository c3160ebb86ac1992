"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): all heads share one stored latent for each token.

A head computes its keys from the latents with a matrix of its own, and its values likewise. Here the key matrix is
applied to the query instead, and the value matrix to the weighted sum. Attention therefore runs over the latents
themselves. Keys and values are computed only for rows with many new tokens, if the table has an operator for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, TensorSpec
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import ROWS, WHOLE, Cut, check_context, share
from forkpoint.models.fields import Fields
from forkpoint.models.layers import Projection, RMSNorm, RowParallel, read_projection
from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention.dealt import attend_parts, gather_keys, joined
from forkpoint.ops.linear.scaled import dense
from forkpoint.ops.metadata import AttentionIndex, GatheredRows
from forkpoint.ops.ranks import Ranks

EXPANDED_FROM = 256  # new tokens of a row from which on its keys and values are computed
LATENT_NORM_EPS = 1e-6  # fixed in the architecture, independent of rms_norm_eps


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(PartConfig):
    """One layer's latent attention.

    A query head has `key_dim` dims that are multiplied with the head's key, and `shared_dim` dims that are multiplied
    with the part of the key that all heads share. If `rotated`, the shared dims are rotated in pairs of neighbours. If
    `gated`, each head's output is multiplied by the sigmoid of a gate. `rank` is the size of a latent. Queries are
    computed in two steps through `query_rank` dims with a norm, unless that is 0.
    """

    num_heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    rank: int
    query_rank: int = 0
    rotated: bool = False
    gated: bool = False
    name: str = "self_attn"

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> LatentAttentionConfig:
        """Read DeepSeek's field names; `style` sets what config.json does not contain. Raises as Fields does."""
        fields.refuse("attention_bias")
        return cls(
            num_heads=fields.integer("num_attention_heads"),
            key_dim=fields.integer("qk_nope_head_dim"),
            shared_dim=fields.integer("qk_rope_head_dim"),
            value_dim=fields.integer("v_head_dim"),
            rank=fields.integer("kv_lora_rank"),
            query_rank=fields.integer("q_lora_rank", 0, low=0),
            **style,
        )

    def build(self, build: Build, name: str, layer: int) -> LatentAttention:
        return LatentAttention(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (KVSpec((TensorSpec("latent", (1, self.rank + self.shared_dim), dtype),)),)

    def cut(self, ranks: Ranks) -> LatentAttentionConfig:
        check_context(ranks.size, "latents", ranks)
        return replace(self, num_heads=share(self.num_heads, "heads", ranks))

    def num_weights(self, hidden_size: int) -> int:
        queries, out = self.num_heads * (self.key_dim + self.shared_dim), self.num_heads * self.value_dim
        inner = hidden_size * (queries + out)
        if self.query_rank:
            inner = hidden_size * (self.query_rank + out) + self.query_rank * queries
        return inner + self.rank * (hidden_size + self.num_heads * (self.key_dim + self.value_dim))

    def flops_per_pair(self) -> int:
        return 2 * self.num_heads * (2 * self.rank + self.shared_dim)


class LatentAttention:
    """The latent attention of layer `layer`, with weights packed for its operators."""

    def __init__(self, build: Build, name: str, layer: int, config: LatentAttentionConfig) -> None:
        self._ops, self._layer, self._config = build.ops, layer, config
        hidden, heads, rank = build.config.hidden_size, config.num_heads, config.rank
        self._cos_sin: Tensor | None = None
        latents = f"{name}.kv_a_proj_with_mqa"
        if config.rotated:
            self._cos_sin = build.rope_table(build.config.rotary)
            narrow = read_dense(build, latents, rank + config.shared_dim, hidden)
            self._latents = Projection(build.ops, _apart(narrow, rank))
        else:
            self._latents = read_projection(build, latents, rank + config.shared_dim, hidden)
        self._queries = self._read_queries(build, name)
        self._gate = read_projection(build, f"{name}.g_proj", heads, hidden, cut=ROWS) if config.gated else None
        self._norm = RMSNorm(build, f"{name}.kv_a_layernorm", rank, centred=False, eps=LATENT_NORM_EPS)
        up, self._to_latent, self._from_latent = read_up(build, name, heads, config.key_dim, config.value_dim, rank)
        self._expand = Projection(build.ops, up) if build.ops.latent_prefill is not None else None
        self._out = RowParallel(build, f"{name}.o_proj", hidden, heads * config.value_dim)
        self._scale = (config.key_dim + config.shared_dim) ** -0.5

    def _read_queries(self, build: Build, name: str) -> Callable[[Tensor], Tensor]:
        config, width, part = self._config, build.config.hidden_size, "q_proj"
        if config.query_rank:
            into = read_projection(build, f"{name}.q_a_proj", config.query_rank, width)
            norm = RMSNorm(build, f"{name}.q_a_layernorm", config.query_rank, centred=False, eps=LATENT_NORM_EPS)
            width, part = config.query_rank, "q_b_proj"
        heads, dim = config.num_heads, config.key_dim + config.shared_dim
        if config.rotated:
            wide = read_dense(build, f"{name}.{part}", heads * dim, width, ROWS).view(heads, dim, width)
            queries = Projection(build.ops, _apart(wide, config.key_dim).flatten(0, 1))
        else:
            queries = read_projection(build, f"{name}.{part}", heads * dim, width, cut=ROWS)
        if not config.query_rank:
            return queries
        return lambda x: queries(norm(into(x)))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend: `x[T, H] -> [T, H]`, after storing the tokens' latents in the layer's cache."""
        config = self._config
        queries = torch.unflatten(self._queries(x), -1, (config.num_heads, -1))
        own, shared = torch.split(queries, [config.key_dim, config.shared_dim], dim=-1)
        shared = self._write(shared, x, ctx)
        out = self._attend(own, shared, ctx.caches[self._layer]["latent"], ctx.attention)
        if self._gate is not None:
            out = sigmoid_mul(out, self._gate(x).unsqueeze(-1))
        return self._out(out.flatten(1))

    def keep(self, x: Tensor, ctx: ForwardContext) -> None:
        """Store the latents of `x[T, H]` without attending."""
        config = self._config
        # the operator needs queries, whose values do not matter here
        self._write(x.new_zeros(len(x), config.num_heads, config.shared_dim), x, ctx)

    def _write(self, shared: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the latents of `x[T, H]`, and return the queries' shared dims `[T, heads, shared_dim]`, rotated."""
        norm, cache = self._norm, ctx.caches[self._layer]["latent"]
        rotation, places = (self._cos_sin, ctx.positions), ctx.attention.key_places
        return self._ops.latent_write(shared, self._latents(x), norm.weight, norm.eps, *rotation, cache, places)

    def _attend(self, own: Tensor, shared: Tensor, cache: Tensor, index: AttentionIndex) -> Tensor:
        """Return what the queries read from the cache, `[T, heads, value_dim]`."""
        dealt, rank = index.dealt, self._config.rank
        if dealt is None:
            return self._attend_whole(own, shared, cache, index)

        def whole(rows: GatheredRows) -> Tensor:
            at = rows.tokens
            return self._attend_whole(own[at], shared[at], gather_keys(cache, rows, dealt), rows.index)

        def part(count: int) -> Tensor:
            queries = self._absorbed(own[:count], shared[:count])
            out = attend_parts(self._ops, queries, cache, cache[..., :rank], dealt, self._scale)
            return self._ops.linear_heads(out, self._from_latent)

        return joined(dealt, part, whole)

    def _attend_whole(self, own: Tensor, shared: Tensor, cache: Tensor, index: AttentionIndex) -> Tensor:
        """Return what the queries read from a cache that has all keys.

        Rows with at least EXPANDED_FROM new tokens use keys and values computed from the latents, if the table has an
        operator for that. Other rows use the latents.
        """
        long = [row for row, count in enumerate(index.query_lens) if count >= EXPANDED_FROM]
        if self._expand is None or not long:
            return self._attend_absorbed(own, shared, cache, index)
        starts = list(accumulate(index.query_lens, initial=0))
        if sum(index.query_lens[row] for row in long) < own.shape[0]:
            out = self._attend_absorbed(own, shared, cache, index.without(long)).contiguous()
        else:
            out = own.new_empty(*own.shape[:2], self._config.value_dim)
        assert self._ops.latent_prefill is not None
        for row in long:
            at = slice(starts[row], starts[row + 1])
            self._ops.latent_prefill(
                own[at], shared[at], cache, self._config.rank, self._expand, index, row, self._scale, out[at]
            )
        return out

    def _absorbed(self, own: Tensor, shared: Tensor) -> Tensor:
        """Return queries of latents, `[T, heads, rank + shared_dim]`."""
        return torch.cat((self._ops.linear_heads(own, self._to_latent), shared), dim=-1)

    def _attend_absorbed(self, own: Tensor, shared: Tensor, cache: Tensor, index: AttentionIndex) -> Tensor:
        queries, values = self._absorbed(own, shared), cache[..., : self._config.rank]
        out = self._ops.paged_attention(queries, cache, values, index, self._scale, None)
        return self._ops.linear_heads(out, self._from_latent)


def read_up(build: Build, name: str, heads: int, key_dim: int, value_dim: int, rank: int) -> tuple[Tensor, Any, Any]:
    """Read the matrix from latents to keys and values, and pack its parts for queries and for values."""
    up = read_dense(build, f"{name}.kv_b_proj", heads * (key_dim + value_dim), rank, ROWS)
    keys, values = torch.split(up.view(heads, -1, rank), [key_dim, value_dim], dim=1)
    return up, build.ops.prepare_linear_heads(keys.transpose(1, 2)), build.ops.prepare_linear_heads(values)


def read_dense(build: Build, name: str, rows: int, columns: int, cut: Cut = WHOLE) -> Tensor:
    """Read a matrix whose rows will be split or reordered. Quantised weights are widened to the model's dtype."""
    return dense(build.weights.get_matrix(f"{name}.weight", (rows, columns), cut))


def _apart(weight: Tensor, first: int) -> Tensor:
    """Return rows reordered from `first` on, so that the first elements of all pairs come before the second ones.

    The checkpoint rotates pairs of neighbours, the operators rotate halves. Queries and keys are reordered alike, which
    leaves their products unchanged.
    """
    rest = torch.arange(first, weight.shape[-2])
    order = torch.cat((torch.arange(first), rest[::2], rest[1::2]))
    return weight[..., order, :]

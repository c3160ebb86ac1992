"""Softmax attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import KVSpec, LayerSpec
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import ROWS, Cut, check_context, rows, share, sharing
from forkpoint.models.fields import Fields
from forkpoint.models.layers import Projection, RMSNorm, RowParallel, join_projections, read_projection
from forkpoint.models.rotary import Rotary
from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention.dealt import attend
from forkpoint.ops.parameters import KVScales, QKNorm
from forkpoint.ops.ranks import Ranks

# (into queries, keys and values; out): projections of several layers, instead of a layer's own.
Products: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(PartConfig):
    """One layer's attention. With `window` each token attends only to the last `window` tokens.

    `bias`: q, k, v and o have one. `gated`: each head's query rows are followed by as many gate rows, and the output is
    multiplied by the gate's sigmoid. `head_gated`: `g_proj` computes one gate for each head instead. `qk_norm`:
    normalise each head, all heads together, or nothing. `centred`: see RMSNorm. Head counts are those of one rank after
    `cut`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    name: str = "self_attn"
    bias: bool = False
    window: int | None = None
    scale: float | None = None  # factor of the scores; None: head_dim**-0.5
    out_scale: float = 1.0
    gated: bool = False
    head_gated: bool = False
    qk_norm: Literal["head", "all"] | None = "head"
    centred: bool = False
    rotary: Rotary | None = None  # None: the model's
    sharing: int = 1  # number of ranks that hold the same KV heads

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> Self:
        """Read the names that most config.json use; `style` sets what they do not contain. Raises as Fields does."""
        kv_heads = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
        heads = fields.multiple("num_attention_heads", kv_heads, "KV heads")
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        bias = fields.flag("attention_bias", False)
        return cls(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, bias=bias, **style)

    def build(self, build: Build, name: str, layer: int) -> Attention:
        return Attention(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        spec = KVSpec.of(self.num_kv_heads, self.head_dim, self.head_dim, dtype, takes_fp8=True)
        return (replace(spec, window=self.window),)

    def cut(self, ranks: Ranks) -> AttentionConfig:
        heads = share(self.num_heads, "query heads", ranks)
        kv_heads = share(self.num_kv_heads, "KV heads", ranks, shared=self.qk_norm != "all")
        copies = sharing(self.num_kv_heads, ranks)
        check_context(copies, f"{self.num_kv_heads} KV heads", ranks)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, sharing=copies)

    @property
    def rows(self) -> dict[str, Cut]:
        """The rows of this rank in the projections into queries (with their gates), keys and values: q, k, v."""
        queries, keys, _ = self.sizes
        shared = Cut(0, ((keys, self.sharing),))
        return {"q": rows(queries * (1 + self.gated)), "k": shared, "v": shared}

    @property
    def sizes(self) -> list[int]:
        """The number of elements of a token's queries, keys and values on one rank."""
        return [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (sum(self.sizes) + self.sizes[0] + self.num_heads * self.head_gated)

    def flops_per_pair(self) -> int:
        return 4 * self.num_heads * self.head_dim


class Attention:
    """The attention of layer `layer`, with weights packed for its operators. `products` replace its own projections."""

    def __init__(
        self, build: Build, name: str, layer: int, config: AttentionConfig, products: Products | None = None
    ) -> None:
        self._build, self._layer, self._config = build, layer, config
        self._q_size, self._kv_size, _ = config.sizes
        self._qkv, self._out = products or (self._read_qkv(name), self._read_out(name))
        sizes = [self._q_size * build.ranks.size, self._kv_size * build.ranks.size]
        normed = {"head": [config.head_dim] * 2, "all": sizes, None: []}[config.qk_norm]
        parts = zip("qk", normed, strict=False)
        norms = [RMSNorm(build, f"{name}.{part}_norm", size, config.centred) for part, size in parts]
        self._head_norm: QKNorm | None = None
        if config.qk_norm == "head":
            self._head_norm, norms = QKNorm(norms[0].weight, norms[1].weight, norms[0].eps), []
        self._norms = norms
        self._scale = config.scale or config.head_dim**-0.5
        self._table = build.rope_table(config.rotary or build.config.rotary)
        self._head_gate: Projection | None = None
        if config.head_gated:
            hidden = build.config.hidden_size
            self._head_gate = read_projection(build, f"{name}.g_proj", config.num_heads, hidden, cut=ROWS)

    def _read_out(self, name: str) -> Callable[[Tensor], Tensor]:
        config, hidden = self._config, self._build.config.hidden_size
        return RowParallel(self._build, f"{name}.o_proj", hidden, self._q_size, config.bias, config.out_scale)

    def _read_qkv(self, name: str) -> Callable[[Tensor], Tensor]:
        """Read rows `[q | k | v]`, followed by the gate's rows if there are gates.

        Stored gates alternate with queries, head by head.
        """
        build, config, hidden = self._build, self._config, self._build.config.hidden_size
        order = None
        if config.gated:
            heads = torch.arange(2 * self._q_size).view(config.num_heads, 2, config.head_dim)
            others = torch.arange(2 * self._kv_size) + 2 * self._q_size
            order = torch.cat((heads[:, 0].flatten(), others, heads[:, 1].flatten()))
        return join_projections(build, name, config.rows, hidden, config.bias, order=order)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend: `x[T, H] -> [T, H]`, after storing the tokens' keys and values in the layer's cache."""
        config, sizes = self._config, [self._q_size, self._kv_size, self._kv_size]
        q, k, v, *gate = torch.split(self._qkv(x), sizes + [self._q_size] * config.gated, dim=-1)
        if self._norms:
            q, k = (norm.across(part, self._build.ranks) for norm, part in zip(self._norms, (q, k), strict=True))
        out = self.attend(x, self.write(q, k, v, ctx), gate[0] if gate else None, ctx)
        if self._head_gate is not None:
            out = sigmoid_mul(out, self._head_gate(x).unsqueeze(-1))
        return self._out(out.flatten(1))

    def attend(self, x: Tensor, q: Tensor, gate: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Attend with queries `q[T, heads, dim]` of hidden states `x[T, H]` to the stored keys; return `[T, heads,
        dim]`."""
        cache, window = ctx.caches[self._layer], self._config.window
        index, scales = ctx.attention_of(window), KVScales.of(cache)
        return attend(self._build.ops, q, cache["k"], cache["v"], index, self._scale, window, gate, scales)

    def write(self, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """Store keys and values `[T, heads * dim]`, and return the normalised and rotated queries `[T, heads, dim]`."""
        q, k, v = (torch.unflatten(x, -1, (-1, self._config.head_dim)) for x in (q, k, v))
        build, cache, places = self._build, ctx.caches[self._layer], ctx.attention_of(self._config.window).key_places
        rotated = (self._head_norm, self._table, ctx.positions)
        return build.ops.qk_norm_rope_write(q, k, v, *rotated, cache["k"], cache["v"], places, KVScales.of(cache))

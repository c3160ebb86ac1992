"""Zamba2: Mamba-2 layers. A shared transformer precedes some of them, with small adapters for each use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec
from forkpoint.models.attention import Attention, AttentionConfig
from forkpoint.models.config import Block, Build, ModelConfig, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cut, rows, whole
from forkpoint.models.decoder import Layer, Model
from forkpoint.models.fields import Fields
from forkpoint.models.joints import join_rows
from forkpoint.models.layers import MLPConfig, Projection, RMSNorm, RowParallel, join_projections, read_projection
from forkpoint.models.mamba2 import Mamba2Config
from forkpoint.models.rotary import NO_POSITIONS
from forkpoint.ops.ranks import Ranks

# types of layers with a shared transformer, in transformers' and in other writers' config.json
SHARING = ("hybrid", "g")
NORM_EPS = 1e-5  # epsilon of the gated norm, independent of rms_norm_eps


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig(PartConfig):
    """The `use`-th use of shared transformer `block`, which reads the hidden state joined with the embedding."""

    attention: AttentionConfig
    mlp: MLPConfig
    rank: int
    adapts_attention: bool
    block: int = 0
    use: int = 0
    name: str = "shared_transformer"

    def build(self, build: Build, name: str, layer: int) -> Block:
        return SharedTransformer(build, name, self).used(layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return self.attention.kept(dtype, state_dtype)

    def cut(self, ranks: Ranks) -> SharedConfig:
        return replace(self, attention=self.attention.cut(ranks), mlp=self.mlp.cut(ranks))

    def num_weights(self, hidden_size: int) -> int:
        attention, inner = self.attention, self.mlp.intermediate_size
        rows, adapters = sum(attention.sizes), self.rank * (hidden_size + 2 * inner)
        if self.adapts_attention:
            adapters += self.rank * (6 * hidden_size + rows)
        return hidden_size * (2 * rows + attention.sizes[0] + 3 * inner + hidden_size) + adapters

    def flops_per_pair(self) -> int:
        return self.attention.flops_per_pair()


class SharedTransformer:
    """The weights of a shared transformer, packed once. Their names are those of its first use."""

    def __init__(self, build: Build, name: str, config: SharedConfig) -> None:
        self._build, self._name, self._hidden = build, name, build.config.hidden_size
        attention, hidden, inner = config.attention, self._hidden, config.mlp.intermediate_size
        self._gate_up_rows = rows(inner, inner)
        self._qkv = join_projections(build, f"{name}.self_attn", attention.rows, 2 * hidden)
        self._out = RowParallel(build, f"{name}.self_attn.o_proj", hidden, attention.sizes[0])
        gate_up = f"{name}.feed_forward.gate_up_proj"
        self._gate_up = read_projection(build, gate_up, 2 * inner, hidden, cut=self._gate_up_rows)
        self._down = RowParallel(build, f"{name}.feed_forward.down_proj", hidden, inner)
        self._first = RMSNorm(build, f"{name}.input_layernorm", 2 * hidden, centred=False)
        self._second = RMSNorm(build, f"{name}.pre_ff_layernorm", hidden, centred=False)

    def used(self, layer: int, config: SharedConfig) -> Block:
        """Build `x[T, 2H] -> [T, H]` with the adapters of one use, and the keys and values of layer `layer`."""
        projection: Callable[[Tensor], Tensor] = self._qkv
        if config.adapts_attention:
            parts = config.attention.rows.items()
            adapters = {f"self_attn.linear_{part}_adapter_list.{config.use}": rows for part, rows in parts}
            projection = self._adapted(self._qkv, adapters, 2 * self._hidden, config.rank)
        attention = Attention(self._build, "", layer, config.attention, (projection, self._out))
        adapters = {f"feed_forward.gate_up_proj_adapter_list.{config.use}": self._gate_up_rows}
        gate_up = self._adapted(self._gate_up, adapters, self._hidden, config.rank)

        def block(x: Tensor, ctx: ForwardContext) -> Tensor:
            gate, up = gate_up(self._second(attention(self._first(x), ctx))).chunk(2, dim=-1)
            # Contiguous, so that an element's bits do not depend on the number of rows.
            return self._down(F.gelu(gate.contiguous()) * up)

        return block

    def _adapted(
        self, base: Projection, adapters: Mapping[str, Cut], columns: int, rank: int
    ) -> Callable[[Tensor], Tensor]:
        """Return the function that adds the joined outputs of low-rank adapters to `base(x)`.

        `adapters` maps each adapter's name to the rows that it computes.
        """
        build, named = self._build, {f"{self._name}.{name}": rows for name, rows in adapters.items()}
        into = Projection(build.ops, join_rows(build.weights, {f"{name}.0": whole(rank) for name in named}, columns))
        back = [read_projection(build, f"{name}.1", rows.length, rank, cut=rows) for name, rows in named.items()]

        def adapted(x: Tensor) -> Tensor:
            parts = zip(back, into(x).chunk(len(back), dim=-1), strict=True)
            return base(x) + torch.cat([product(part) for product, part in parts], dim=-1)

        return adapted


class Zamba2(Model):
    architectures: ClassVar = ("Zamba2ForCausalLM",)
    norms: ClassVar = ("input_layernorm",)
    defers_sums: ClassVar = False
    field_names: ClassVar = {"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups"}
    config_class: ClassVar = "zamba2.Zamba2Config"
    unneeded_fields: ClassVar = (
        "attention_hidden_size",
        "hybrid_layer_ids",
        "kv_channels",
        "mamba_headdim",
        "num_query_groups",
    )
    weight_names: ClassVar = (("model.final_layernorm", "model.norm"), (".mamba_decoder.", "."))

    def __init__(self, build: Build) -> None:
        self._shared: dict[int, SharedTransformer] = {}
        super().__init__(build)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("hidden_act", "gelu")
        fields.refuse("add_bias_linear", "use_long_context")
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        dim = fields.integer("attention_head_dim", 2 * hidden // heads)
        named = {"head_dim": dim, "hidden_act": None, "mamba_conv_bias": True, "time_step_limit": None}
        plain = fields.replaced(named)
        shared = SharedConfig(
            attention=AttentionConfig.read(plain, qk_norm=None, scale=(dim / 2) ** -0.5),
            mlp=MLPConfig(fields.integer("intermediate_size", 4 * hidden), fused=True),
            rank=fields.integer("adapter_rank", 128),
            adapts_attention=fields.flag("use_shared_attention_adapter", False),
        )
        mamba = Mamba2Config.read(plain, norm_eps=NORM_EPS)
        count, uses = fields.integer("num_mem_blocks", 1), itertools.count()
        layers: list[tuple[PartConfig, ...]] = []
        usual = {*range(6, 43, 6), 47, 51}  # the layers of the released models, for a config.json that lists none
        kinds = ("linear_attention", *SHARING, "mamba", "m")
        for kind in fields.layer_types(kinds, lambda i: "hybrid" if i in usual else "mamba"):
            if kind in SHARING:
                use = next(uses)
                layers.append((replace(shared, block=use % count, use=use), mamba))
            else:
                layers.append((mamba,))
        rotary = fields.rotary(dim) if fields.flag("use_mem_rope", False) else NO_POSITIONS
        return ModelConfig.of(fields, layers, rotary)

    def build_layer(self, build: Build, layer: int) -> Layer:
        shared, *_ = parts = build.config.layers[layer]
        name = f"model.layers.{layer}"
        if not isinstance(shared, SharedConfig):
            return super().build_layer(build, layer)
        if shared.block not in self._shared:
            self._shared[shared.block] = SharedTransformer(build, f"{name}.{shared.name}", shared)
        hidden = build.config.hidden_size
        return HybridLayer(
            self._shared[shared.block].used(layer, shared),
            read_projection(build, f"{name}.linear", hidden, hidden),
            RMSNorm(build, f"{name}.input_layernorm", hidden, centred=False),
            parts[1].build(build, f"{name}.mamba", layer),
        )

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return super().forward(token_ids, replace(ctx, embedded=self._embed(token_ids)))


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """A layer of `h += mamba(norm(h + linear(shared([h, embedding]))))`."""

    shared: Block
    linear: Projection
    norm: RMSNorm
    mamba: Block

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the layer on `x` and `residual`, see `decoder.Layer`. `ctx.embedded` must hold the tokens' embeddings."""
        assert ctx.embedded is not None
        hidden = x if residual is None else residual + x
        more = self.linear(self.shared(torch.cat((hidden, ctx.embedded), dim=-1), ctx))
        return self.mamba(self.norm(hidden + more), ctx), hidden

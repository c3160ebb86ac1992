"""Kimi-Linear: a delta rule with a decay for each key (KDA), and latent attention without positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.cache.layout import LayerSpec
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.config import Block, Build, ModelConfig, PartConfig
from forkpoint.models.cuts import Cut, Cuts, inward, rows, share
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.layers import MLPConfig, Projection, RMSNorm, RowParallel, read_projection
from forkpoint.models.moe import MoEConfig
from forkpoint.models.recurrence import DUMMY_A_LOG, DUMMY_DT_BIAS, ConvRecurrence, gated_heads, kept_state
from forkpoint.models.weights import join_rows
from forkpoint.ops.parameters import Recurrence, RecurrenceParams
from forkpoint.ops.ranks import Ranks

KINDS = ("linear_attention", "full_attention")  # of layers


@dataclass(frozen=True, slots=True)
class KDAConfig(PartConfig):
    """One layer's recurrence over heads of as many keys as values.

    `narrow`: decays and gates are made in two steps, with a head's width between them. `bound`: see Recurrence.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    narrow: bool = True
    bound: float | None = None
    name: str = "self_attn"

    @property
    def spec(self) -> Recurrence:
        heads, dim = self.num_heads, self.head_dim
        return Recurrence(heads, heads, dim, dim, per_key=True, bound=self.bound)

    def build(self, build: Build, name: str, layer: int) -> Block:
        source, ops, hidden, fp32 = build.weights, build.ops, build.config.hidden_size, torch.float32
        heads, dim, inner = self.num_heads, self.head_dim, self.num_heads * self.head_dim
        mixed = Projection(
            ops, join_rows(source, [f"{name}.{part}_proj.weight" for part in "qkv"], [inner] * 3, hidden)
        )
        parts = ("b", "f_a", "g_a") if self.narrow else ("b", "f", "g")
        widths = [heads, dim, dim] if self.narrow else [heads, inner, inner]
        gates = Projection(ops, join_rows(source, [f"{name}.{part}_proj.weight" for part in parts], widths, hidden))
        wide = [read_projection(build, f"{name}.{part}_b_proj", inner, dim) for part in "fg"] if self.narrow else []
        apart = [f"{name}.{part}_conv1d.weight" for part in "qkv"]
        convolutions = [f"{name}.conv1d.weight"] if source.has(f"{name}.conv1d.weight") else apart
        channels = 3 * inner // len(convolutions)
        taps = torch.cat([source.get(part, (channels, 1, self.conv_width)) for part in convolutions]).squeeze(1)
        stored = source.shape(f"{name}.A_log")
        flat = stored is None or len(stored) == 1
        a_log = source.get(f"{name}.A_log", (heads,) if flat else (1, 1, heads, 1), fp32, DUMMY_A_LOG).flatten()
        dt_bias = source.get(f"{name}.dt_bias", (inner,), fp32, DUMMY_DT_BIAS)
        recurrence = ConvRecurrence(ops, layer, taps, None, RecurrenceParams(self.spec, a_log, dt_bias))

        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            b, decay, gate = torch.split(gates(x), widths, dim=-1)
            if wide:
                decay, gate = wide[0](decay), wide[1](gate)
            return mixed(x), decay, b, gate

        norm = RMSNorm(build, f"{name}.o_norm", dim, centred=False)
        out = RowParallel(build, f"{name}.o_proj", hidden, inner)
        return gated_heads(recurrence, ops, project, norm, out, sigmoid=True)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (kept_state(self.spec, self.conv_width, dtype, state_dtype),)

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[KDAConfig, Cuts]:
        wide = (self.num_heads, self.head_dim)
        projections = [f"{name}_proj" for name in ("q", "k", "v", *(("f_b", "g_b") if self.narrow else ("f", "g")))]
        convolutions = [f"{name}_conv1d" for name in "qkv"]
        cuts = {
            **dict.fromkeys([*projections, *convolutions, "dt_bias"], rows(wide)),
            "conv1d": rows(wide, wide, wide),
            "b_proj": rows((self.num_heads, 1)),
            "A_log": Cut(-2, ((self.num_heads, 1),)),
        }
        own = replace(self, num_heads=share(self.num_heads, "linear heads", ranks))
        return own, cuts | inward("o_proj", hidden_size, ranks)

    def num_weights(self, hidden_size: int) -> int:
        inner = self.num_heads * self.head_dim
        gates = 2 * (self.head_dim * (hidden_size + inner) if self.narrow else hidden_size * inner)
        return hidden_size * (4 * inner + self.num_heads) + gates


class KimiLinear(Model):
    """`KimiLinearForCausalLM`."""

    architectures: ClassVar = ("KimiLinearForCausalLM",)
    config_class: ClassVar = "kimi_linear.KimiLinearConfig"
    weight_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("block_sparse_moe.", "mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
        ("self_attn.forget_gate.", "self_attn."),
    )

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        if not fields.flag("mla_use_nope", True):
            raise UnsupportedModelError(f"{fields.where} has mla_use_nope=False; forkpoint runs it without positions")
        count, given = fields.integer("num_hidden_layers"), fields.inner("linear_attn_config")
        linear = Fields({**fields.values, **given}, fields.where)
        recurrence = KDAConfig(
            num_heads=linear.integer("num_heads", linear.integer("linear_num_heads", 32)),
            head_dim=fields.integer("linear_head_dim", 128) if "head_dim" not in given else linear.integer("head_dim"),
            conv_width=linear.integer("short_conv_kernel_size", linear.integer("linear_conv_kernel_dim", 4), low=2),
        )
        listed = _listed(Fields(given, fields.where), count)
        kinds = fields.layer_types(KINDS, lambda i: KINDS[bool(i and i % 4 == 0) if listed is None else listed[i]])
        attention = LatentAttentionConfig.read(fields)
        return ModelConfig.of(fields, layers(fields, kinds, recurrence, attention))


def layers(
    fields: Fields, kinds: Sequence[str], recurrence: PartConfig, attention: PartConfig
) -> list[tuple[PartConfig, ...]]:
    """Of these KINDS; the first are dense, the others choose experts by sigmoids, a shared one added."""
    fields.require("moe_router_activation_func", "sigmoid")
    shared = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", 1)
    sparse = MoEConfig.read_grouped(fields, shared_intermediate_size=shared)
    first = fields.integer("first_k_dense_replace", 1, low=0)
    listed = Fields({**fields.values, "layer_types": fields.values.get("mlp_layer_types")}, fields.where)
    mlps = listed.layer_types(("dense", "sparse"), lambda i: "dense" if i < first else "sparse")
    dense, mixers = MLPConfig.read(fields), dict(zip(KINDS, (recurrence, attention), strict=True))
    return [(mixers[kind], dense if mlp == "dense" else sparse) for kind, mlp in zip(kinds, mlps, strict=True)]


def _listed(given: Fields, count: int) -> list[bool] | None:
    """Whether each layer is one of attention, by lists that count layers from 1; None: there are none."""
    full, kda = given.indices("full_attn_layers"), given.indices("kda_layers")
    if full is None or kda is None:
        return None
    if sorted([*full, *kda]) != list(range(1, count + 1)):
        raise ModelFolderError(
            f"{given.where}: full_attn_layers and kda_layers must name each of the {count} layers once"
        )
    return [layer in full for layer in range(1, count + 1)]

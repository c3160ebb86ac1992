"""Kimi-Linear and Ling-3.0.

Kimi-Linear alternates a delta rule that has a decay for each key (KDA) and latent attention without positions. Ling-3.0
has the same layers with bounded decays, positions and a gate in attention, and experts in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import Build, ModelConfig, MTPNames, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import ROWS, rows, whole
from forkpoint.models.decoder import Model
from forkpoint.models.field_rules import unknown_fields
from forkpoint.models.fields import Fields
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.layers import MLPConfig, Projection, join_projections, read_projection
from forkpoint.models.ling_vision import LingVisionConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.mtp import draft_layer
from forkpoint.models.recurrence import Project, RecurrentConfig
from forkpoint.models.vision import VisionConfig
from forkpoint.ops.parameters import GateLimits, Recurrence

KINDS = ("linear_attention", "full_attention")  # of layers, as transformers names them
ExpertLimits: TypeAlias = tuple[GateLimits | None, GateLimits | None]  # of a layer's routed experts and shared one
NO_LIMITS: Final = (None, None)


@dataclass(frozen=True, kw_only=True)
class KDAConfig(RecurrentConfig):
    """One layer's KDA recurrence, with as many key heads as value heads.

    `narrow`: decays and gates are computed by two matrices, with a head's width between them.
    """

    narrow: bool = True
    norm_name: str = "o_norm"
    out_name: str = "o_proj"
    name: str = "self_attn"
    sigmoid: bool = True
    heads_are: ClassVar = "linear heads"

    @classmethod
    def of(cls, heads: int, dim: int, conv_width: int, bound: float | None = None, narrow: bool = True) -> KDAConfig:
        """Create the config of `heads` heads of `dim` keys and values. `bound` limits decays, see Recurrence."""
        spec = Recurrence(heads, heads, dim, dim, per_key=True, bound=bound)
        return cls(spec=spec, conv_width=conv_width, narrow=narrow)

    def project(self, build: Build, name: str) -> Project:
        heads, dim, inner, hidden = self.spec.num_v_heads, self.spec.value_dim, self.inner, build.config.hidden_size
        parts, wider = {"b": rows(heads), "f": rows(inner), "g": rows(inner)}, list[Projection]()
        if self.narrow:
            parts = {"b": rows(heads), "f_a": whole(dim), "g_a": whole(dim)}
            wider = [read_projection(build, f"{name}.{part}_b_proj", inner, dim, cut=ROWS) for part in "fg"]
        widths = [part.length for part in parts.values()]
        mixed = join_projections(build, name, dict.fromkeys("qkv", rows(inner)), hidden)
        gates = join_projections(build, name, parts, hidden)

        def project(x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            b, decay, gate = torch.split(gates(x), widths, dim=-1)
            if wider:
                decay, gate = wider[0](decay), wider[1](gate)
            return mixed(x), decay, b, gate

        return project

    def num_weights(self, hidden_size: int) -> int:
        gates = hidden_size * self.inner
        if self.narrow:
            gates = self.spec.value_dim * (hidden_size + self.inner)
        return hidden_size * (self.spec.mixed_dim + self.inner + self.spec.num_v_heads) + 2 * gates


class KimiLinear(Model):
    architectures: ClassVar = ("KimiLinearForCausalLM",)
    config_class: ClassVar = "kimi_linear.KimiLinearConfig"
    unneeded_fields: ClassVar = ("head_dim", "linear_head_dim", "num_key_value_heads", "rope_theta", "use_grouped_topk")
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
        linear = fields.replaced(given)
        recurrence = KDAConfig.of(
            linear.integer("num_heads", linear.integer("linear_num_heads", 32)),
            fields.integer("linear_head_dim", 128) if "head_dim" not in given else linear.integer("head_dim"),
            linear.integer("short_conv_kernel_size", linear.integer("linear_conv_kernel_dim", 4), low=2),
        )
        attends = _attends(linear, count)
        kinds = fields.layer_types(KINDS, lambda i: KINDS[attends[i]])
        attention = LatentAttentionConfig.read(fields)
        unknown = unknown_fields(given, fields.values.read, {}, (), f"{fields.where}: linear_attn_config")
        return ModelConfig.of(fields, layers(fields, kinds, recurrence, attention), unknown_fields=unknown)


class BailingHybrid(Model):
    """The family of `BailingHybridForCausalLM`, which some checkpoints call `BailingMoeV3ForCausalLM`."""

    architectures: ClassVar = ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")
    config_class: ClassVar = "bailing_hybrid.BailingHybridConfig"
    unneeded_fields: ClassVar = ("moe_shared_expert_intermediate_size", "num_key_value_heads", "partial_rotary_factor")
    weight_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        ("self_attn.dense.", "self_attn.o_proj."),
        ("self_attn.forget_gate.", "self_attn."),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def read_vision(cls, fields: Fields, config: ModelConfig, settings: ImageSettings) -> VisionConfig:
        return LingVisionConfig.read_ling(fields, config, settings)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        bound = fields.number("kda_lower_bound", -5.0) if fields.flag("kda_safe_gate", True) else None
        recurrence = KDAConfig.of(
            fields.integer("linear_num_heads", fields.integer("num_attention_heads")),
            fields.integer("linear_head_dim", fields.integer("head_dim", 128)),
            fields.integer("linear_conv_kernel_dim", fields.integer("short_conv_kernel_size", 4), low=2),
            bound,
            narrow=False,
        )
        every = fields.integer("layer_group_size", 6)
        kinds = fields.layer_types(KINDS, lambda i: KINDS[(i + 1) % every == 0])
        attention = LatentAttentionConfig.read(fields, rotated=True, gated=True)
        fields.rope().require("rope_type", "default")
        limits_of = partial(_limits, fields)
        parts = layers(fields, kinds, recurrence, attention, limits_of)
        return ModelConfig.of(
            fields,
            parts,
            fields.rotary(attention.shared_dim),
            draft_layer=draft_layer(fields, attention, sparse_mlp(fields, limits_of(len(parts)))),
            mtp_names=mtp_names_of(f"model.layers.{len(parts)}"),
        )


def _limits(fields: Fields, layer: int) -> ExpertLimits:
    """Read the limits of a layer's routed experts and of its shared one. Raises as Fields does."""
    routed = fields.limit_of_layer("expert_swiglu_limit_list", layer)
    shared = fields.limit_of_layer("share_expert_swiglu_limit_list", layer)
    return GateLimits.of_silu(routed) if routed else None, GateLimits.of_silu(shared) if shared else None


def mtp_names_of(name: str) -> MTPNames:
    """Return the names of an MTP head that is stored as one more layer `name`."""
    return MTPNames(
        embedding_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        join=f"{name}.eh_proj",
        norm=f"{name}.final_layernorm",
        blocks=((f"{name}.input_layernorm", name), (f"{name}.post_attention_layernorm", name)),
    )


def sparse_mlp(fields: Fields, limits: ExpertLimits = NO_LIMITS) -> PartConfig:
    """Read experts that are chosen by sigmoid scores, and a shared one. Raises as Fields does."""
    size = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", 1)
    routed, shared = limits
    return MoEConfig.read_grouped(fields, shared_intermediate_size=size, limits=routed, shared_limits=shared)


def layers(
    fields: Fields,
    kinds: Sequence[str],
    recurrence: PartConfig,
    attention: PartConfig,
    limits_of: Callable[[int], ExpertLimits] = lambda layer: NO_LIMITS,
) -> list[tuple[PartConfig, ...]]:
    """Return the parts of layers of the given KINDS. Raises as Fields does."""
    fields.require("moe_router_activation_func", "sigmoid")
    mixers = dict(zip(KINDS, (recurrence, attention), strict=True))
    found = mlps(fields, 1, MLPConfig.read(fields), limits_of)
    return [(mixers[kind], mlp) for kind, mlp in zip(kinds, found, strict=True)]


def mlps(
    fields: Fields, num_dense: int, dense: PartConfig, limits_of: Callable[[int], ExpertLimits]
) -> list[PartConfig]:
    """Return each layer's MLP: `dense` in the first layers (by default `num_dense`), or in the listed ones.

    The others choose experts by sigmoid scores and add a shared one. Raises as Fields does.
    """
    first = fields.integer("first_k_dense_replace", num_dense, low=0)
    listed = fields.replaced({"layer_types": fields.values.get("mlp_layer_types")})
    kinds = listed.layer_types(("dense", "sparse"), lambda i: "dense" if i < first else "sparse")
    return [dense if kind == "dense" else sparse_mlp(fields, limits_of(i)) for i, kind in enumerate(kinds)]


def _attends(given: Fields, count: int) -> list[bool]:
    """Return for each layer whether it is attention, from lists that count layers from 1.

    Without such lists every fourth layer is, except the first. Raises ModelFolderError if they do not name each layer
    once.
    """
    full, kda = given.indices("full_attn_layers"), given.indices("kda_layers")
    if full is None or kda is None:
        return [layer > 0 and layer % 4 == 0 for layer in range(count)]
    if sorted([*full, *kda]) != list(range(1, count + 1)):
        raise ModelFolderError(
            f"{given.where}: full_attn_layers and kda_layers must name each of the {count} layers once"
        )
    return [layer in full for layer in range(1, count + 1)]

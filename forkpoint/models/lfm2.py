"""LFM2: gated short convolutions and attention, dense or sparse."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.convolution import ShortConvConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.ops.parameters import RouteRule


class Lfm2(Model):
    architectures: ClassVar[tuple[str, ...]] = ("Lfm2ForCausalLM",)
    norms: ClassVar = ("operator_norm", "ffn_norm")
    field_names: ClassVar = {
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    }
    config_class: ClassVar = "lfm2.Lfm2Config"
    unneeded_fields: ClassVar[tuple[str, ...]] = ("block_dim", "block_norm_eps", "conv_dim", "num_heads")
    defaults: ClassVar = {"rope_theta": 1e6}
    weight_names: ClassVar = (
        ("embedding_norm", "norm"),
        ("feed_forward.", "mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("q_layernorm", "q_norm"),
        ("k_layernorm", "k_norm"),
    )

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        width = fields.integer("conv_L_cache", 3, low=2)
        conv = ShortConvConfig(
            channels=fields.integer("hidden_size"), width=width, bias=fields.flag("conv_bias", False)
        )
        attention = AttentionConfig.read(fields)
        listed = fields.indices("full_attn_idxs")
        mixers: dict[str, PartConfig] = {"conv": conv, "full_attention": attention}
        kinds = fields.layer_types(mixers, lambda i: "full_attention" if listed is None or i in listed else "conv")
        layers = [(mixers[kind], cls.mlp(fields, layer)) for layer, kind in enumerate(kinds)]
        return ModelConfig.of(fields, layers, fields.rotary(attention.head_dim))

    @classmethod
    def mlp(cls, fields: Fields, layer: int) -> PartConfig:
        """Return layer `layer`'s MLP, here a dense one of two thirds of `intermediate_size`, rounded up.

        config.json can turn that adjustment off.
        """
        size = fields.integer("intermediate_size")
        unit = fields.integer("block_multiple_of", 256)
        multiplier = fields.real("block_ffn_dim_multiplier", 1.0)
        if fields.flag("block_auto_adjust_ff_dim", True):
            size = -(-int(multiplier * int(2 * size / 3)) // unit) * unit
        return MLPConfig(size)


class Lfm2Moe(Lfm2):
    """The family of `Lfm2MoeForCausalLM`: all but the first layers have experts."""

    architectures: ClassVar[tuple[str, ...]] = ("Lfm2MoeForCausalLM",)
    config_class: ClassVar = "lfm2_moe.Lfm2MoeConfig"

    @classmethod
    def mlp(cls, fields: Fields, layer: int) -> PartConfig:
        if layer < fields.integer("num_dense_layers", 2, low=0):
            return MLPConfig.read(fields)
        rule = RouteRule(top_k=0, score="sigmoid", eps=1e-6, scale=fields.real("routed_scaling_factor", 1.0))
        return MoEConfig.of(fields, rule, bias="expert_bias" if fields.flag("use_expert_bias", True) else None)

"""Bamba and Falcon-H1: Mamba-2 and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, ParallelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba2 import Mamba2Config


class Bamba(Model):
    """`BambaForCausalLM`: Mamba-2, with attention in listed layers that rotates half of each head."""

    architectures: ClassVar = ("BambaForCausalLM",)
    norms: ClassVar = ("input_layernorm", "pre_ff_layernorm")
    config_class: ClassVar = "bamba.BambaConfig"
    weight_names: ClassVar = (("model.final_layernorm", "model.norm"), (".feed_forward.", ".mlp."))

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.refuse("mlp_bias")
        attention, mamba = AttentionConfig.read(fields, qk_norm=None), Mamba2Config.read(fields)
        chosen, mlp = fields.indices("attn_layer_indices") or [], MLPConfig.read(fields)
        mixers: list[PartConfig] = [
            attention if layer in chosen else mamba for layer in range(fields.integer("num_hidden_layers"))
        ]
        return ModelConfig.of(fields, [(mixer, mlp) for mixer in mixers], fields.rotary(attention.head_dim, 0.5))


class FalconH1(Bamba):
    """`FalconH1ForCausalLM`: attention and Mamba-2 in parallel, with a multiplier for every projection."""

    architectures: ClassVar = ("FalconH1ForCausalLM",)
    config_class: ClassVar = "falcon_h1.FalconH1Config"

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.refuse("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
        into, out = fields.real("attention_in_multiplier", 1.0), fields.real("attention_out_multiplier", 1.0)
        attention = AttentionConfig.read(fields, qk_norm=None, out_scale=into * out)
        # The input multiplier scales both queries and keys, so it is squared in the scores.
        scale = into**2 * fields.real("key_multiplier", 1.0) * attention.head_dim**-0.5
        order = "before" if fields.flag("mamba_norm_before_gate", True) else "after"
        mamba = Mamba2Config.read(
            fields,
            norm=order if fields.flag("mamba_rms_norm", False) else None,
            scales=tuple(fields.real("ssm_in_multiplier", 1.0) * by for by in fields.reals("ssm_multipliers", 5)),
            out_scale=fields.real("ssm_out_multiplier", 1.0),
        )
        gate, down = fields.reals("mlp_multipliers", 2)
        layer = (
            ParallelConfig((mamba, replace(attention, scale=scale))),
            replace(MLPConfig.read(fields), gate_scale=gate, down_scale=down),
        )
        return ModelConfig.of(
            fields,
            [layer] * fields.integer("num_hidden_layers"),
            fields.rotary(attention.head_dim),
            embedding_scale=fields.real("embedding_multiplier", 1.0),
            logits_scale=fields.real("lm_head_multiplier", 1.0),
        )

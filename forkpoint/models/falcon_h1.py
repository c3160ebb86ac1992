"""Falcon-H1: attention and Mamba-2 side by side, with a multiplier at every product."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.bamba import Bamba
from forkpoint.models.config import ModelConfig, ParallelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba2 import Mamba2Config

BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


class FalconH1(Model):
    """`FalconH1ForCausalLM`."""

    architectures: ClassVar = ("FalconH1ForCausalLM",)
    norms: ClassVar = Bamba.norms
    config_class: ClassVar = "falcon_h1.FalconH1Config"
    weight_names: ClassVar = Bamba.weight_names

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.refuse(*BIASES)
        into, out = fields.real("attention_in_multiplier", 1.0), fields.real("attention_out_multiplier", 1.0)
        attention = AttentionConfig.read(fields, qk_norm=None, out_scale=into * out)
        # Queries and keys both have the input's factor.
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

"""Bamba: Mamba-2, and attention with positions in half of each head."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba2 import Mamba2Config


class Bamba(Model):
    """`BambaForCausalLM`."""

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

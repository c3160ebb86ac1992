"""Mamba-2: recurrent layers alone."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import BACKBONE, Model
from forkpoint.models.fields import Fields
from forkpoint.models.mamba2_mixer import Mamba2Config


class Mamba2(Model):
    """`Mamba2ForCausalLM`. Its config.json names no longest sequence."""

    architectures: ClassVar = ("Mamba2ForCausalLM",)
    norms: ClassVar = ("norm",)
    field_names: ClassVar = {
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    config_class: ClassVar = "mamba2.Mamba2Config"
    defaults: ClassVar = {"max_position_embeddings": 1 << 20}
    weight_names: ClassVar = BACKBONE

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        layer = (Mamba2Config.read(fields, name="mixer"),)
        return ModelConfig.of(fields, [layer] * fields.integer("num_hidden_layers"))

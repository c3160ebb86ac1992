"""Arcee: Llama with an MLP that has no gate."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig


class Arcee(Model):
    """`ArceeForCausalLM`."""

    architectures: ClassVar = ("ArceeForCausalLM",)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        attention = AttentionConfig.read(fields, qk_norm=None)
        mlp = MLPConfig(fields.integer("intermediate_size"), gated=False)
        layers = [(attention, mlp)] * fields.integer("num_hidden_layers")
        return ModelConfig.of(fields, layers, fields.rotary(attention.head_dim))

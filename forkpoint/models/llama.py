"""Llama and Mistral: attention only, without norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig


class Llama(Model):
    """`LlamaForCausalLM`."""

    architectures: ClassVar = ("LlamaForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    }

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.refuse("mlp_bias")
        attention = AttentionConfig.read(fields, qk_norm=None, window=cls.window(fields))
        layers = [(attention, MLPConfig.read(fields))] * fields.integer("num_hidden_layers")
        return ModelConfig.of(fields, layers, fields.rotary(attention.head_dim))

    @staticmethod
    def window(fields: Fields) -> int | None:
        """Of every layer."""
        return None


class Mistral(Llama):
    """`MistralForCausalLM`: all layers have a window, unless it is said to be null."""

    architectures: ClassVar = ("MistralForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **Llama.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    }

    @staticmethod
    def window(fields: Fields) -> int | None:
        said = fields.values.get("sliding_window", 4096)
        return None if said is None else fields.integer("sliding_window", 4096)

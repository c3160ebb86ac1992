"""Llama, Mistral and Qwen3: attention only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig


class Llama(Model):
    """`LlamaForCausalLM`."""

    architectures: ClassVar = ("LlamaForCausalLM",)
    qk_norm: ClassVar[Literal["head"] | None] = None
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
        mlp, head_dim = MLPConfig.read(fields), AttentionConfig.read(fields).head_dim
        attention = [AttentionConfig.read(fields, qk_norm=cls.qk_norm, window=width) for width in cls.windows(fields)]
        return ModelConfig.of(fields, [(part, mlp) for part in attention], fields.rotary(head_dim))

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        """Of each layer."""
        return [None] * fields.integer("num_hidden_layers")


class Mistral(Llama):
    """`MistralForCausalLM`: all layers have a window, unless it is said to be null."""

    architectures: ClassVar = ("MistralForCausalLM",)
    defaults: ClassVar = {
        **Llama.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    }

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
            return super().windows(fields)
        return [fields.integer("sliding_window", 4096)] * fields.integer("num_hidden_layers")


class Qwen3(Llama):
    """`Qwen3ForCausalLM`: queries and keys are normalised, and the last layers may have a window."""

    architectures: ClassVar = ("Qwen3ForCausalLM",)
    qk_norm: ClassVar = "head"
    defaults: ClassVar = {
        **Llama.defaults,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "eos_token_id": [],
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        first = fields.integer("max_window_layers", low=0)
        slides = fields.flag("use_sliding_window", False)
        kinds = fields.layer_types(
            ("full_attention", "sliding_attention"),
            lambda i: "sliding_attention" if slides and i >= first else "full_attention",
        )
        return [fields.integer("sliding_window") if kind == "sliding_attention" else None for kind in kinds]

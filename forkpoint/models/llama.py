"""Llama, Mistral and Qwen3: attention only."""

from __future__ import annotations

from typing import ClassVar, Literal

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig


class Llama(Model):
    architectures: ClassVar = ("LlamaForCausalLM",)
    qk_norm: ClassVar[Literal["head"] | None] = None
    config_class: ClassVar = "llama.LlamaConfig"

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.refuse("mlp_bias")
        mlp, head_dim = MLPConfig.read(fields), AttentionConfig.read(fields).head_dim
        attention = [AttentionConfig.read(fields, qk_norm=cls.qk_norm, window=width) for width in cls.windows(fields)]
        return ModelConfig.of(fields, [(part, mlp) for part in attention], fields.rotary(head_dim))

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        """Return the window of each layer in tokens. None means that the layer attends to all tokens."""
        return [None] * fields.integer("num_hidden_layers")


class Mistral(Llama):
    """`MistralForCausalLM`: all layers have a sliding window, unless config.json sets it to null."""

    architectures: ClassVar = ("MistralForCausalLM",)
    config_class: ClassVar = "mistral.MistralConfig"

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
            return super().windows(fields)
        return [fields.integer("sliding_window", 4096)] * fields.integer("num_hidden_layers")


class Qwen3(Llama):
    """`Qwen3ForCausalLM`: queries and keys are normalised, and the last layers may have a window."""

    architectures: ClassVar = ("Qwen3ForCausalLM",)
    qk_norm: ClassVar = "head"
    config_class: ClassVar = "qwen3.Qwen3Config"
    unneeded_fields: ClassVar = ("sliding_window",)

    @classmethod
    def windows(cls, fields: Fields) -> list[int | None]:
        first = fields.integer("max_window_layers", low=0)
        slides = fields.flag("use_sliding_window", False)
        kinds = fields.layer_types(
            ("full_attention", "sliding_attention"),
            lambda i: "sliding_attention" if slides and i >= first else "full_attention",
        )
        return [fields.integer("sliding_window") if kind == "sliding_attention" else None for kind in kinds]

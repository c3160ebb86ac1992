"""Ling-3.0: Kimi-Linear's layers with bounded decays, positions and a gate in attention, and groups of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from forkpoint.models.config import ModelConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.kimi_linear import KINDS, KDAConfig, layers
from forkpoint.models.latent_attention import LatentAttentionConfig


class BailingHybrid(Model):
    """`BailingHybridForCausalLM`, and as the hub calls it."""

    architectures: ClassVar = ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")
    config_class: ClassVar = "bailing_hybrid.BailingHybridConfig"
    weight_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        ("self_attn.dense.", "self_attn.o_proj."),
        ("self_attn.forget_gate.", "self_attn."),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

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
        parts = layers(fields, kinds, recurrence, attention)
        return ModelConfig.of(fields, parts, fields.rotary(attention.shared_dim))

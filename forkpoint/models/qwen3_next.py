"""Qwen3-Next and Qwen3.5: gated attention and gated delta net, dense or sparse."""

from __future__ import annotations

from typing import ClassVar, Final

from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, MTPNames, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig, layer_types
from forkpoint.models.layers import MLPConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.mtp import draft_layer
from forkpoint.models.qwen3_5_vision import Qwen35VisionConfig
from forkpoint.models.vision import VisionConfig

MTP_NAMES: Final = MTPNames(
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    join="mtp.fc",
    norm="mtp.norm",
    blocks=tuple((f"mtp.layers.0.{norm}", "mtp.layers.0") for norm in ("input_layernorm", "post_attention_layernorm")),
    centred=True,
)


class Qwen3Next(Model):
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    centred_norms: ClassVar = True
    config_class: ClassVar = "qwen3_next.Qwen3NextConfig"
    unneeded_fields: ClassVar = (
        "intermediate_size",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    )
    wide: ClassVar[tuple[str, ...]] = ("in_proj_qkvz",)  # see GDNConfig
    narrow: ClassVar[tuple[str, ...]] = ("in_proj_ba",)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("output_gate_type", "silu", "swish")
        attention = AttentionConfig.read(fields, gated=True, centred=True)
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, wide=cls.wide, narrow=cls.narrow),
            "full_attention": attention,
        }
        layers = [(mixers[kind], cls._mlp(fields, i)) for i, kind in enumerate(layer_types(fields))]
        # the MLP that the next layer would have
        drafts = draft_layer(fields, attention, cls._mlp(fields, fields.integer("num_hidden_layers") - 1))
        rotary = fields.rotary(attention.head_dim, 0.25)
        return ModelConfig.of(fields, layers, rotary, draft_layer=drafts, mtp_names=MTP_NAMES)

    @staticmethod
    def _mlp(fields: Fields, layer: int) -> PartConfig:
        step, dense = fields.integer("decoder_sparse_step", 1), fields.indices("mlp_only_layers") or []
        if fields.integer("num_experts", 0, low=0) and layer not in dense and (layer + 1) % step == 0:
            return MoEConfig.read(fields)
        return MLPConfig.read(fields)


class Qwen35(Qwen3Next):
    """Qwen3.5, dense: the projections of recurrent layers are stored as separate matrices."""

    architectures: ClassVar = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    config_class: ClassVar = "qwen3_5.Qwen3_5TextConfig"
    wide: ClassVar = ("in_proj_qkv", "in_proj_z")
    narrow: ClassVar = ("in_proj_b", "in_proj_a")
    vision_class: ClassVar = "qwen3_5.Qwen3_5VisionConfig"  # of transformers, whose defaults apply

    @classmethod
    def read_vision(cls, fields: Fields, config: ModelConfig, settings: ImageSettings) -> VisionConfig:
        return Qwen35VisionConfig.read(fields, config.rotary, cls.vision_class, settings)


class Qwen35Moe(Qwen35):
    architectures: ClassVar = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    config_class: ClassVar = "qwen3_5_moe.Qwen3_5MoeTextConfig"
    vision_class: ClassVar = "qwen3_5_moe.Qwen3_5MoeVisionConfig"

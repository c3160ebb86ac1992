"""Granite-4-H: Mamba-2 and attention, dense or sparse, with scaled embeddings, residuals, scores and logits."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, ParallelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba2 import Mamba2Config
from forkpoint.models.moe import MoEConfig
from forkpoint.models.rotary import NO_POSITIONS
from forkpoint.ops.parameters import RouteRule


class GraniteHybrid(Model):
    architectures: ClassVar = ("GraniteMoeHybridForCausalLM",)
    field_names: ClassVar = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}
    config_class: ClassVar = "granitemoehybrid.GraniteMoeHybridConfig"
    unneeded_fields: ClassVar = ("intermediate_size", "num_experts_per_tok")
    weight_names: ClassVar = (
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.", "block_sparse_moe.gate."),
        ("block_sparse_moe.router.", "block_sparse_moe.gate."),
        ("input_linear", "gate_up_proj"),
        ("output_linear", "down_proj"),
    )

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("position_embedding_type", "rope", "nope")
        residual, eps = fields.real("residual_multiplier", 1.0), fields.real("rms_norm_eps")
        attention = AttentionConfig.read(fields, qk_norm=None, scale=fields.real("attention_multiplier", 1.0))
        mixers: dict[str, PartConfig] = {"linear_attention": Mamba2Config.read(fields), "full_attention": attention}
        # the names that checkpoints on the Hugging Face hub use
        mixers |= {"mamba": mixers["linear_attention"], "attention": attention}
        kinds = fields.layer_types(mixers, lambda i: "mamba")
        mlp: PartConfig = MLPConfig(fields.integer("shared_intermediate_size"), name="shared_mlp", fused=True)
        if fields.integer("num_experts", low=0):
            routed = MoEConfig.of(fields, RouteRule(top_k=0), name="block_sparse_moe")
            mlp = ParallelConfig((routed, mlp))
        rotary = fields.rotary(attention.head_dim)
        if fields.values.get("position_embedding_type") != "rope":
            rotary = NO_POSITIONS
        return ModelConfig.of(
            fields,
            [(mixers[kind], mlp) for kind in kinds],
            rotary,
            # Hidden states are stored divided by the residual multiplier, which is then 1. Norms give the same result,
            # because their epsilon is scaled too.
            rms_norm_eps=eps / residual**2,
            embedding_scale=fields.real("embedding_multiplier", 1.0) / residual,
            logits_scale=1.0 / fields.real("logits_scaling", 1.0),
        )

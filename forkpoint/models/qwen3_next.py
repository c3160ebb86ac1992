"""Qwen3-Next: gated attention and gated delta net, dense or sparse."""

from __future__ import annotations

from typing import ClassVar

import torch

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Build, ModelConfig, PartConfig
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig, layer_types, read_conv
from forkpoint.models.layers import MLPConfig
from forkpoint.models.moe import MoEConfig
from forkpoint.models.mtp import draft_layer
from forkpoint.ops.linear.scaled import Matrix, take_rows


class Qwen3Next(Model):
    """`Qwen3NextForCausalLM`."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    centred_norms: ClassVar = True
    config_class: ClassVar = "qwen3_next.Qwen3NextConfig"

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("output_gate_type", "silu", "swish")
        attention = AttentionConfig.read(fields, gated=True, centred=True)
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, read_input=cls.read_input, read_conv=read_conv),
            "full_attention": attention,
        }
        layers = [(mixers[kind], cls._mlp(fields, i)) for i, kind in enumerate(layer_types(fields))]
        drafts = draft_layer(fields, attention, cls._mlp)
        return ModelConfig.of(fields, layers, fields.rotary(attention.head_dim, 0.25), draft_layer=drafts)

    @staticmethod
    def _mlp(fields: Fields, layer: int) -> PartConfig:
        step, dense = fields.integer("decoder_sparse_step", 1), fields.indices("mlp_only_layers") or []
        is_sparse = fields.integer("num_experts", 0, low=0) and layer not in dense and (layer + 1) % step == 0
        return MoEConfig.read(fields) if is_sparse else MLPConfig.read(fields)

    @staticmethod
    def read_input(build: Build, name: str, config: GDNConfig) -> tuple[Matrix, Matrix]:
        """Stored head by head: per key head q, k, then v and z of its value heads; b and a alike."""
        shape = config.shape
        group = shape.num_v_heads // shape.num_k_heads
        sizes = [shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim]
        parts = []
        for part, per_head in ("in_proj_qkvz", sizes), ("in_proj_ba", [group, group]):
            rows = torch.arange(shape.num_k_heads * sum(per_head)).view(shape.num_k_heads, -1)
            order = torch.cat([head.flatten() for head in torch.split(rows, per_head, dim=1)])
            matrix = build.weights.get_matrix(f"{name}.{part}.weight", (len(order), build.config.hidden_size))
            parts.append(take_rows(matrix, order))
        return parts[0], parts[1]

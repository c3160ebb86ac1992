"""Qwen3.5 text models: as Qwen3-Next, with the recurrent layers' projections stored apart."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.config import Build
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.qwen3_next import Qwen3Next
from forkpoint.models.weights import join_rows
from forkpoint.ops.linear.scaled import Matrix


class Qwen35(Qwen3Next):
    """Dense models, and the text part of their multimodal folders."""

    architectures: ClassVar = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    config_class: ClassVar = "qwen3_5.Qwen3_5TextConfig"

    @staticmethod
    def read_input(build: Build, name: str, config: GDNConfig) -> tuple[Matrix, Matrix]:
        source, shape, hidden = build.weights, config.shape, build.config.hidden_size
        qkv, z, b, a = (f"{name}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        wide = join_rows(source, [qkv, z], [shape.mixed_dim, config.value_size], hidden)
        return wide, join_rows(source, [b, a], [shape.num_v_heads] * 2, hidden)


class Qwen35Moe(Qwen35):
    """Sparse models, and the text part of their multimodal folders."""

    architectures: ClassVar = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    config_class: ClassVar = "qwen3_5_moe.Qwen3_5MoeTextConfig"

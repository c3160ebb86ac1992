"""Qwen3.5 text models: as Qwen3-Next, with the recurrent layers' projections stored apart."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """Dense models, and the text part of their multimodal folders."""

    architectures: ClassVar = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    config_class: ClassVar = "qwen3_5.Qwen3_5TextConfig"
    wide: ClassVar = ("in_proj_qkv", "in_proj_z")
    narrow: ClassVar = ("in_proj_b", "in_proj_a")


class Qwen35Moe(Qwen35):
    """Sparse models, and the text part of their multimodal folders."""

    architectures: ClassVar = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    config_class: ClassVar = "qwen3_5_moe.Qwen3_5MoeTextConfig"

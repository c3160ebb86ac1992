"""Qwen3.5 text models: as Qwen3-Next, with the recurrent layers' projections stored apart."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from forkpoint.models.gated_delta_net import GDNNames, gdn_shape, read_conv
from forkpoint.models.layers import Build
from forkpoint.models.qwen3_next import Qwen3Next
from forkpoint.models.weights import join_rows


def _read_input(build: Build, name: str) -> Tensor:
    shape = gdn_shape(build)
    rows = [shape.mixed_dim, shape.num_v_heads * shape.value_dim, shape.num_v_heads, shape.num_v_heads]
    names = [f"{name}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    return join_rows(build.weights, names, rows, build.config.hidden_size)


class Qwen35(Qwen3Next):
    """`Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`, and the text part of their multimodal checkpoints."""

    gdn_names: ClassVar[GDNNames] = GDNNames(_read_input, read_conv, norm="norm", out="out_proj")

"""OLMo-Hybrid: gated delta net before, attention behind its norms; decays may be negative."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Build, ModelConfig, PartConfig
from forkpoint.models.decoder import Layer, Model, PostNormLayer, PreNormLayer
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig, layer_types, read_conv
from forkpoint.models.layers import MLPConfig, RMSNorm
from forkpoint.models.rotary import NO_POSITIONS
from forkpoint.models.weights import join_rows
from forkpoint.ops.linear.scaled import Matrix

GATED_NORM_EPS = 1e-5  # fixed in the architecture, whatever rms_norm_eps says


def _read_input(build: Build, name: str, config: GDNConfig) -> tuple[Matrix, Matrix]:
    source, shape, hidden = build.weights, config.shape, build.config.hidden_size
    keys, values = shape.num_k_heads * shape.key_dim, config.value_size
    names = [f"{name}.{part}_proj.weight" for part in "qkvgba"]
    wide = join_rows(source, names[:4], [keys, keys, values, values], hidden)
    return wide, join_rows(source, names[4:], [shape.num_v_heads] * 2, hidden)


def _read_conv(build: Build, name: str, config: GDNConfig) -> Tensor:
    """Three convolutions end to end. Only their sum of channels is fixed: some writers cut it in even thirds."""
    source, shape = build.weights, config.shape
    if source.has(f"{name}.conv1d.weight"):
        return read_conv(build, name, config)
    parts = []
    for part in "qkv":
        stored = source.shape(f"{name}.{part}_conv1d.weight") or ()
        parts.append(source.get(f"{name}.{part}_conv1d.weight", (*stored[:1], 1, config.conv_width)))
    weight = torch.cat(parts).squeeze(1)
    own = build.shares.part(f"{name}.conv1d.weight", (shape.mixed_dim, config.conv_width))
    channels = own.whole[0] if own else shape.mixed_dim
    if weight.shape[0] != channels:
        raise ModelFolderError(
            f"the convolutions of {name} have {weight.shape[0]} channels together; config.json asks for {channels}"
        )
    return own.of(weight) if own else weight


def _norm(build: Build, *names: str) -> RMSNorm:
    """The norm under the first of its names that is stored."""
    name = next((name for name in names if build.weights.has(f"{name}.weight")), names[0])
    return RMSNorm(build, name, build.config.hidden_size, centred=False)


class OlmoHybrid(Model):
    """`OlmoHybridForCausalLM`."""

    architectures: ClassVar = ("OlmoHybridForCausalLM",)
    config_class: ClassVar = "olmo_hybrid.OlmoHybridConfig"

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        style = {"norm": "o_norm", "out": "o_proj", "norm_eps": GATED_NORM_EPS}
        attention = AttentionConfig.read(fields, qk_norm="all")
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, read_input=_read_input, read_conv=_read_conv, **style),
            "full_attention": attention,
        }
        nowhere = fields.rope().values["rope_theta"] is None  # the released models have no positions
        rotary = NO_POSITIONS if nowhere else fields.rotary(attention.head_dim)
        return ModelConfig.of(fields, [(mixers[kind], MLPConfig.read(fields)) for kind in layer_types(fields)], rotary)

    def build_layer(self, build: Build, layer: int) -> Layer:
        name = f"model.layers.{layer}"
        mixer, mlp = self.blocks(build, layer)
        middle = _norm(build, f"{name}.post_attention_layernorm", f"{name}.feedforward_layer_norm")
        if isinstance(build.config.layers[layer][0], GDNConfig):
            first = _norm(build, f"{name}.input_layernorm", f"{name}.attention_layer_norm")
            return PreNormLayer([(first, mixer), (middle, mlp)])
        last = _norm(build, f"{name}.post_feedforward_layernorm")
        return PostNormLayer([(middle, mixer), (last, mlp)])

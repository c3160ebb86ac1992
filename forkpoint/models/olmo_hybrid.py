"""OLMo-Hybrid: gated delta nets with norms before them, and attention with norms after it. Decays may be negative."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Build, ModelConfig, PartConfig
from forkpoint.models.decoder import Layer, Model, PostNormLayer
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig, layer_types
from forkpoint.models.layers import MLPConfig
from forkpoint.models.rotary import NO_POSITIONS

POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
GATED_NORM_EPS = 1e-5  # fixed in the architecture, independent of rms_norm_eps


class OlmoHybrid(Model):
    architectures: ClassVar = ("OlmoHybridForCausalLM",)
    defers_sums: ClassVar = False
    config_class: ClassVar = "olmo_hybrid.OlmoHybridConfig"
    weight_names: ClassVar = (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    )

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        wide, narrow = tuple(f"{part}_proj" for part in "qkvg"), ("b_proj", "a_proj")
        style = {"norm_name": "o_norm", "out_name": "o_proj", "norm_eps": GATED_NORM_EPS}
        attention = AttentionConfig.read(fields, qk_norm="all")
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, wide=wide, narrow=narrow, **style),
            "full_attention": attention,
        }
        # the released models have no positions and say rope_theta=null
        nowhere = fields.rope().values["rope_theta"] is None
        rotary = NO_POSITIONS if nowhere else fields.rotary(attention.head_dim)
        return ModelConfig.of(fields, [(mixers[kind], MLPConfig.read(fields)) for kind in layer_types(fields)], rotary)

    def build_layer(self, build: Build, layer: int) -> Layer:
        if isinstance(build.config.layers[layer][0], GDNConfig):
            return super().build_layer(build, layer)
        return PostNormLayer(self.normed_blocks(build, layer, POST_NORMS))

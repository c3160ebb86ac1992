"""OLMo-Hybrid: gated delta net before, attention behind its norms; decays may be negative."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Build, ModelConfig, PartConfig
from forkpoint.models.decoder import Layer, Model, PostNormLayer, PreNormLayer
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import GDNConfig, layer_types
from forkpoint.models.layers import MLPConfig, RMSNorm
from forkpoint.models.rotary import NO_POSITIONS

GATED_NORM_EPS = 1e-5  # fixed in the architecture, whatever rms_norm_eps says


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
        wide, narrow = tuple(f"{part}_proj" for part in "qkvg"), ("b_proj", "a_proj")
        style = {"norm_name": "o_norm", "out_name": "o_proj", "norm_eps": GATED_NORM_EPS}
        attention = AttentionConfig.read(fields, qk_norm="all")
        mixers: dict[str, PartConfig] = {
            "linear_attention": GDNConfig.read(fields, wide=wide, narrow=narrow, **style),
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

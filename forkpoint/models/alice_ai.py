"""AliceAI: KDA and gated attention, with block attention residuals instead of one residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedModelError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import Block, Build, ModelConfig, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.decoder import Layer, Model
from forkpoint.models.fields import Fields
from forkpoint.models.gated_delta_net import layer_types
from forkpoint.models.kimi_linear import KDAConfig
from forkpoint.models.layers import RMSNorm
from forkpoint.models.moe import MoEConfig, read_wide
from forkpoint.models.mtp import draft_layer
from forkpoint.models.qwen3_next import MTP_NAMES
from forkpoint.ops.parameters import RouteRule


class Mixer:
    """Mix a token's residuals, weighted by a softmax of learned scores (Kimi Team 2026, "Attention Residuals")."""

    def __init__(self, build: Build, norm: str, query: str) -> None:
        source, size = build.weights, build.config.hidden_size
        weight = source.get(norm, (size,), torch.float32, (0.9, 1.1))
        self._weight = weight * read_wide(source, f"{query}.weight", (1, size))[0]
        self._mix, self._eps = build.ops.mix_residuals, build.config.rms_norm_eps

    def __call__(self, done: Tensor, current: Tensor | None) -> Tensor:
        """Mix `done[N, T, H]` and, if given, `current[T, H]`: `-> [T, H]`."""
        return self._mix(done, current, self._weight, self._eps)


class MixedLayer:
    """Layer `layer`, in which attention and MLP each read a mixture of residuals and add to the block's sum.

    A block is `config.residual_block` layers. `x` is the sum of the block's outputs so far. In a block's first layer it
    is the sum of the block before, and in the first block the token embeddings. `residual[N, T, H]` has the embeddings
    and the sums of finished blocks.
    """

    def __init__(self, build: Build, layer: int, blocks: Sequence[tuple[RMSNorm, Block]]) -> None:
        name, count, size = f"model.layers.{layer}", len(build.config.layers), build.config.residual_block
        self._capacity, self._done, self._begins = -(-count // size), layer // size + 1, layer % size == 0
        self._blocks = blocks
        self._attention_mixer: Mixer | None = None
        if layer:
            self._attention_mixer = Mixer(build, f"{name}.attn_res_norm_weight", f"{name}.attn_res_proj")
        self._mlp_mixer = Mixer(build, f"{name}.mlp_res_norm_weight", f"{name}.mlp_res_proj")

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = x.new_empty(self._capacity, *x.shape)
        if self._begins:
            residual[self._done - 1] = x
        done, current = residual[: self._done], None if self._begins else x
        if self._attention_mixer is not None:
            x = self._attention_mixer(done, current)
        (before_attention, attention), (before_mlp, mlp) = self._blocks
        out = attention(before_attention(x), ctx)
        current = out if current is None else current + out
        return current + mlp(before_mlp(self._mlp_mixer(done, current)), ctx), residual


class AliceAI(Model):
    """`AliceAIForCausalLM`. transformers has no class for it. The defaults are those of vLLM's configuration class,
    which extends Qwen3-Next's. The MTP head is that of Qwen3-Next, with this family's experts and one residual."""

    architectures: ClassVar = ("AliceAIForCausalLM",)
    centred_norms: ClassVar = True
    defers_sums: ClassVar = False  # mixers read hidden states
    config_class: ClassVar = "qwen3_next.Qwen3NextConfig"
    defaults: ClassVar = {
        "vocab_size": 129024,
        "max_position_embeddings": 262144,
        "rope_theta": 1e6,
        "linear_num_key_heads": 32,
        "block_attn_res_block_size": 4,
    }
    unneeded_fields: ClassVar = ("intermediate_size", "number_of_conv_states")
    weight_names: ClassVar = ((".a_log_bias", ".A_log"),)

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("hidden_act", "silu")
        fields.require("router_score_function", "sigmoid")
        fields.refuse("attention_bias", "kda_allow_negative_eigenvalues")
        if not fields.flag("router_bias_correction", True):
            raise UnsupportedModelError(
                f"{fields.where} has router_bias_correction=false; forkpoint runs this family with it"
            )
        if fields.indices("mlp_only_layers") or fields.integer("decoder_sparse_step", 1) != 1:
            raise UnsupportedModelError(
                f"{fields.where} has mlp_only_layers or decoder_sparse_step; forkpoint runs this family with experts "
                "in all layers"
            )
        attention = AttentionConfig.read(fields, gated=True, centred=True)
        mixers: dict[str, PartConfig] = {"linear_attention": _kda(fields), "full_attention": attention}
        experts = MoEConfig.of(
            fields,
            RouteRule(top_k=0, score="sigmoid", eps=1e-20, shared="gated"),
            bias="gate.e_score_correction_bias",
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        )
        layers = [(mixers[kind], experts) for kind in layer_types(fields)]
        size = fields.integer("block_attn_res_block_size")
        drafts = draft_layer(fields, attention, experts)
        rotary = fields.rotary(attention.head_dim, 0.25)
        more = {"residual_block": size, "draft_layer": drafts, "mtp_names": MTP_NAMES}
        return ModelConfig.of(fields, layers, rotary, **more)

    def build_layer(self, build: Build, layer: int) -> Layer:
        return MixedLayer(build, layer, self.normed_blocks(build, layer, self.norms))

    def build_end(self, build: Build) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Build the function that mixes the embeddings and the sums of all blocks, and normalises the mixture."""
        mixer = Mixer(build, "model.attnres_final.res_norm_weight", "model.attnres_final.res_proj")
        norm = RMSNorm(build, "model.norm", build.config.hidden_size, self.centred_norms)

        def finish(x: Tensor, residual: Tensor | None) -> Tensor:
            assert residual is not None, "a model has a layer"
            return norm(mixer(residual, x))

        return finish


def _kda(fields: Fields) -> PartConfig:
    sizes = [
        (fields.integer(f"linear_num_{part}_heads"), fields.integer(f"linear_{part}_head_dim"))
        for part in ("key", "value")
    ]
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"{fields.where} has (heads, dims) {sizes[0]} for keys and {sizes[1]} for values; forkpoint runs KDA with "
            "equal ones"
        )
    recurrence = KDAConfig.of(*sizes[0], fields.integer("linear_conv_kernel_dim", 4, low=2))
    return replace(recurrence, name="linear_attn")

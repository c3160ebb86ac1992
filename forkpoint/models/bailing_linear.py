"""Ling-2.6, Ring-2.6 and their predecessors 2.5: lightning attention and latent attention, with experts in groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedModelError
from forkpoint.models.config import Build, ModelConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import rows, share, sharing
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.joints import join_rows
from forkpoint.models.kimi_linear import KINDS, BailingHybrid, layers, mtp_names_of, sparse_mlp
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.layers import Projection, RMSNorm, RowParallel
from forkpoint.models.mtp import draft_layer
from forkpoint.models.recurrence import Project, RecurrentConfig, read_group_norm
from forkpoint.models.rotary import Rotary
from forkpoint.ops.parameters import Recurrence, RecurrenceParams
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.rope.reference import rope


@dataclass(frozen=True, kw_only=True)
class LightningConfig(RecurrentConfig):
    """One layer's lightning attention (Qin et al. 2024): `S <- e^-s S + v k^T`, with a fixed slope s for each head.

    This is Mamba-2's recurrence with steps of 1. Queries and keys are normalised head by head and rotated. Another norm
    spans `groups` groups of heads, and the gate follows it.
    """

    rotary: Rotary
    groups: int
    sharing: int = 1  # number of ranks that hold the same groups; the norm then spans these ranks
    name: str = "self_attn"

    @classmethod
    def of(cls, heads: int, dim: int, rotary: Rotary, groups: int) -> LightningConfig:
        """Create the config of `heads` heads of `dim` keys and values, with a norm over `groups` groups."""
        spec = Recurrence(heads, heads, dim, dim, delta=False, step_limit=(1.0, 1.0))
        return cls(spec=spec, conv_width=0, rotary=rotary, groups=groups)

    def project(self, build: Build, name: str) -> Project:
        heads, dim, inner, eps = self.spec.num_v_heads, self.spec.key_dim, self.inner, build.config.rms_norm_eps
        stored = {f"{name}.query_key_value": rows(inner, inner, inner), f"{name}.g_proj": rows(inner)}
        product = Projection(build.ops, join_rows(build.weights, stored, build.config.hidden_size))
        q_norm, k_norm = (RMSNorm(build, f"{name}.{part}_layernorm", dim, centred=False) for part in ("query", "key"))
        q_weight = q_norm.weight * dim**-0.5  # the recurrence does not scale queries without the delta rule
        table, rmsnorm = build.rope_table(self.rotary), build.ops.rmsnorm
        assert table is not None, "lightning attention rotates queries and keys"
        unused = torch.zeros(1, heads, dtype=build.weights.dtype, device=build.weights.device)

        def project(x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, None, Tensor]:
            *qk, v, gate = torch.split(product(x), inner, dim=-1)
            q, k = (torch.unflatten(part, -1, (heads, dim)) for part in qk)
            q, k = rope(rmsnorm(q, q_weight, eps), rmsnorm(k, k_norm.weight, eps), table, ctx.positions)
            return torch.cat((q.flatten(1), k.flatten(1), v), dim=-1), unused.expand(len(x), heads), None, gate

        return project

    def params(self, build: Build, name: str, layer: int) -> RecurrenceParams:
        """Return the constants of layer `layer`: slopes shrink with depth, as in the published modeling code."""
        heads, ranks = self.spec.num_v_heads, build.ranks
        depth = 1 - (layer - 1) / max(1, len(build.config.layers) - 1) + 1e-5
        own = slopes(heads * ranks.size)[ranks.rank * heads : (ranks.rank + 1) * heads]
        a_log = torch.tensor([math.log(slope * depth) for slope in own], device=build.weights.device)
        return RecurrenceParams(self.spec, a_log, torch.zeros_like(a_log))

    def finish(self, build: Build, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        norm = read_group_norm(build, f"{name}.g_norm", self.inner, self.groups, self.sharing, sigmoid=True)
        out = RowParallel(build, f"{name}.o_proj", build.config.hidden_size, self.inner)
        return lambda heads, gate: out(norm(heads, gate))

    def cut(self, ranks: Ranks) -> LightningConfig:
        heads = share(self.spec.num_v_heads, "heads", ranks)
        groups = share(self.groups, "groups of heads", ranks, shared=True)
        spec = replace(self.spec, num_k_heads=heads, num_v_heads=heads)
        return replace(self, spec=spec, groups=groups, sharing=sharing(self.groups, ranks))

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.spec.mixed_dim + 2 * self.inner)


def slopes(heads: int) -> list[float]:
    """Return the slope of each head in the first layers, as ALiBi (Press et al. 2022) defines them.

    For a power of two they are `2^(-8 i / heads)`. Otherwise those of the power of two below are followed by every
    second one of the power of two above.
    """
    below = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    if below == heads:
        return first
    return first + slopes(2 * below)[0 : 2 * (heads - below) : 2]


class BailingMoeV25(Model):
    """The family of `BailingMoeV2_5ForCausalLM`. transformers has no class for it.

    The defaults are those of its own configuration class.
    """

    architectures: ClassVar = ("BailingMoeV2_5ForCausalLM",)
    field_names: ClassVar = {"num_shared_experts": "n_shared_experts"}
    defaults: ClassVar = {
        "vocab_size": 157184,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "max_position_embeddings": 32768,
        "rope_theta": 600000.0,
        "eos_token_id": 156892,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 512,
        "head_dim": 128,
        "num_nextn_predict_layers": 0,
        "layer_group_size": 5,
        "group_norm_size": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
    }
    unneeded_fields: ClassVar = (
        "max_window_layers",
        "num_key_value_heads",
        "rotary_dim",
        "router_dtype",
        "seq_aux",
    )
    weight_names: ClassVar = BailingHybrid.weight_names

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        _require_published(fields)
        heads, dim = fields.integer("num_attention_heads"), fields.integer("head_dim", 128)
        groups = fields.integer("group_norm_size")
        fields.multiple("num_attention_heads", groups, "groups of heads")
        rotary = fields.rotary(dim, 0.5)
        linear = LightningConfig.of(heads, dim, rotary, groups)
        every, count = fields.integer("layer_group_size"), fields.integer("num_hidden_layers")
        whole = count // every * every  # layers after the last whole group attend
        kinds = fields.layer_types(KINDS, lambda i: KINDS[(i + 1) % every == 0 or i >= whole])
        attention = LatentAttentionConfig.read(fields, rotated=True)
        return ModelConfig.of(
            fields,
            layers(fields, kinds, linear, attention),
            fields.rotary(attention.shared_dim),
            draft_layer=draft_layer(fields, attention, sparse_mlp(fields)),
            mtp_names=mtp_names_of(f"model.layers.{count}"),
        )


def _require_published(fields: Fields) -> None:
    """Raise UnsupportedModelError for values that the published modeling code does not run.

    Also for those that engines read differently.
    """
    fields.refuse("linear_silu", "use_linear_silu", "norm_head")
    for name, value in (("score_function", "sigmoid"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.require(name, value)
    for name in ("use_qk_norm", "moe_router_enable_expert_bias", "rope_interleave"):
        if not fields.flag(name, True):
            raise UnsupportedModelError(f"{fields.where} has {name}=false; forkpoint runs this family with it")
    rope, size = fields.rope(), fields.integer("moe_intermediate_size")
    heads = fields.integer("num_attention_heads")
    for name, usual in (
        ("num_kv_heads_for_linear_attn", heads),
        ("moe_shared_expert_intermediate_size", size),
        ("mscale_all_dim", 0),
    ):
        if (given := rope.values.get(name)) not in (None, 0, usual):
            raise UnsupportedModelError(f"{fields.where} has {name}={given!r}; forkpoint runs this family with {usual}")

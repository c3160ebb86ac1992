"""GLM-5.3.

Its layers are a bounded delta rule with a decay for each key (KDA), and latent attention to the keys that an index
chooses. The hidden state is several streams, which each part reads and writes through manifold-constrained
hyper-connections (mHC, Xie et al. 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.config import Build, ModelConfig, StreamsConfig
from forkpoint.models.decoder import Model
from forkpoint.models.field_rules import unknown_fields
from forkpoint.models.fields import Fields
from forkpoint.models.indexed_latent_attention import IndexedLatentConfig, RecentLatentConfig
from forkpoint.models.key_index import POOL_OPERATORS, IndexConfig
from forkpoint.models.kimi_linear import KDAConfig, mlps, mtp_names_of, sparse_mlp
from forkpoint.models.layers import MLPConfig, Projection, RMSNorm
from forkpoint.models.mtp import draft_layer
from forkpoint.models.streams import Mixer, StreamLayer
from forkpoint.models.sums import mean, summed, weighted
from forkpoint.ops.activation.reference import sigmoid
from forkpoint.ops.norm.reference import rmsnorm
from forkpoint.ops.parameters import GateLimits

LINEAR: Final = "linear_attention"
ATTENTION: Final = ("indexed_attention", "full_attention", "deepseek_sparse_attention")  # names of one kind of layer
SAFE_BOUND: Final = -5.0  # the bound of decays that are safe if config.json has none
# Ranges of random weights of hyper-connections, with which streams differ from each other.
DUMMY_BASE: Final = (-1.0, 1.0)
DUMMY_SCALE: Final = (0.5, 1.5)


class Glm5Next(Model):
    """The family of `Glm5NextForConditionalGeneration`, of which the text part runs, and `Glm5NextForCausalLM`."""

    architectures: ClassVar = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
    config_class: ClassVar = "glm5_next.Glm5NextTextConfig"
    field_names: ClassVar = {"n_routed_experts": "num_experts"}
    unneeded_fields: ClassVar = (
        *("head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration"),
        *("moe_router_dtype", "topk_method", "index_skip_topk_offset", "kda_layers", "full_attn_layers"),
        "index_topk_pattern",
    )
    weight_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("self_attn.forget_gate.", "self_attn."),
        (".hc_attn_", ".attn_hc."),
        (".hc_ffn_", ".ffn_hc."),
    )
    defers_sums: ClassVar = False  # streams are read by more than norms
    waiting: ClassVar = POOL_OPERATORS

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        for name in ("mla_use_nope", "mhc", "index_kpool_compress", "index_kpool_always_select_tail"):
            if not fields.flag(name, True):
                raise UnsupportedModelError(f"{fields.where} has {name}=false; forkpoint runs GLM-5.3 with true alone")
        fields.refuse("attention_bias")
        if fields.integer("qk_rope_head_dim", 0, low=0):
            raise UnsupportedModelError(f"{fields.where} has qk_rope_head_dim above 0; forkpoint runs GLM-5.3 with 0")
        kinds, limit = fields.layer_types((LINEAR, *ATTENTION), _default_kind), fields.real("swiglu_limit")
        limits = GateLimits(limit, limit)
        blocks = mlps(fields, 3, MLPConfig.read(fields, limits), lambda layer: (limits, limits))
        _require_own_indexes(fields, kinds)
        mixers = {LINEAR: _recurrence(fields), **dict.fromkeys(ATTENTION, _attention(fields))}
        layers = [(mixers[kind], mlp) for kind, mlp in zip(kinds, blocks, strict=True)]
        streams = HyperConnections(
            fields.integer("hc_mult"), fields.real("hc_eps"), fields.integer("hc_sinkhorn_iters")
        )
        inner, where = fields.inner("linear_attn_config"), f"{fields.where}: linear_attn_config"
        unknown = unknown_fields(inner, fields.values.read, {}, cls.unneeded_fields, where)
        name, drafting = f"model.layers.{len(layers)}", _attention(fields, RecentLatentConfig)
        return ModelConfig.of(
            fields,
            layers,
            streams=streams,
            unknown_fields=unknown,
            draft_layer=draft_layer(fields, drafting, sparse_mlp(fields, (limits, limits))),
            mtp_names=replace(
                mtp_names_of(name), norm=f"{name}.shared_head.norm", unused=(f"{name}.self_attn.indexer.",)
            ),
        )

    def build_layer(self, build: Build, layer: int) -> StreamLayer:
        name, streams = f"model.layers.{layer}", build.config.streams
        assert isinstance(streams, HyperConnections), "the family's own"
        blocks = self.normed_blocks(build, layer, self.norms)
        mixers = (HyperConnection(build, f"{name}.{mixer}_hc", streams) for mixer in ("attn", "ffn"))
        return StreamLayer([(mixer.before(norm), block) for mixer, (norm, block) in zip(mixers, blocks, strict=True)])

    def build_end(self, build: Build) -> Callable[[Tensor, Tensor | None], Tensor]:
        norm = RMSNorm(build, "model.norm", build.config.hidden_size, centred=False)
        return lambda streams, residual: norm(mean(streams))


def _default_kind(layer: int) -> str:
    """Return the kind of layer `layer` if config.json has no layer_types."""
    return ATTENTION[0] if layer % 4 == 3 else LINEAR


def _require_own_indexes(fields: Fields, kinds: Sequence[str]) -> None:
    """Raise UnsupportedModelError for attention layers that use the choice of another layer's index."""
    given = fields.values.get("indexer_types") or fields.values.get("index_topk_pattern")
    own = fields.integer("index_topk_freq", 1, low=0) <= 1
    if given:
        names = list(given) if isinstance(given, (list, str)) else [given]
        own = len(names) == len(kinds)
        own = own and all(name in ("full", "F") for name, kind in zip(names, kinds, strict=True) if kind != LINEAR)
    if not own:
        raise UnsupportedModelError(
            f"{fields.where}: indexer_types, index_topk_pattern or index_topk_freq have layers that share an index; "
            "forkpoint runs GLM-5.3 with an index of its own in each attention layer ('full')"
        )


def _recurrence(fields: Fields) -> KDAConfig:
    """Read the recurrence from its own object, or from fields of the model. Raises as Fields does."""
    given = fields.inner("linear_attn_config")
    linear = fields.replaced(given)
    bound = linear.values.get("gate_lower_bound", fields.values["linear_lower_bound"])
    if given and bound is None and linear.flag("safe_gate", True):
        bound = SAFE_BOUND
    if bound is not None:
        bound = fields.replaced({"linear_lower_bound": bound}).number("linear_lower_bound", SAFE_BOUND)
    return KDAConfig.of(
        linear.integer("num_heads", fields.integer("linear_num_heads")),
        linear.integer("head_dim") if "head_dim" in given else fields.integer("linear_head_dim"),
        linear.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim"), low=2),
        bound,
    )


def _attention(fields: Fields, kind: type[IndexedLatentConfig] = IndexedLatentConfig) -> IndexedLatentConfig:
    num_heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        raise ModelFolderError(f"{fields.where}: num_key_value_heads must equal num_attention_heads={num_heads}")
    num_keys, size = fields.integer("index_topk"), fields.integer("index_kpool")
    heads, dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    return kind(
        num_heads=num_heads,
        key_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank"),
        rank=fields.integer("kv_lora_rank"),
        index=IndexConfig.of(fields, heads, dim, size, num_keys),
    )


@dataclass(frozen=True, slots=True)
class HyperConnections(StreamsConfig):
    """Streams that are mixed by matrices which `rounds` rounds of Sinkhorn's algorithm make doubly stochastic.

    `eps` is added where the algorithm divides, and to the weights that join the streams.
    """

    eps: float
    rounds: int


class HyperConnection:
    """The mixer of one part.

    For each token, one product of the normalised streams gives the weights that join the streams, those that
    distribute the part's output to them, and the matrix that mixes them meanwhile.
    """

    def __init__(self, build: Build, name: str, streams: HyperConnections) -> None:
        source, fp32, count = build.weights, torch.float32, streams.count
        self._streams, width = streams, count * build.config.hidden_size
        self._sizes = [count, count, count * count]
        self._product = Projection(build.ops, source.get(f"{name}.fn", (sum(self._sizes), width), fp32))
        self._base = source.get(f"{name}.base", (sum(self._sizes),), fp32, DUMMY_BASE)
        self._scale = source.get(f"{name}.scale", (3,), fp32, DUMMY_SCALE).repeat_interleave(torch.tensor(self._sizes))
        self._ones, self._eps = torch.ones(width, dtype=fp32), build.config.rms_norm_eps

    def before(self, norm: RMSNorm) -> Mixer:
        """Return the mixer whose joined streams are normalised by `norm`."""

        def mix(streams: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            flat = rmsnorm(streams.flatten(1).float(), self._ones, self._eps)
            scores = self._product.wide(flat) * self._scale + self._base
            join, spread, matrix = torch.split(scores, self._sizes, dim=1)
            mixing = self._doubly_stochastic(torch.unflatten(matrix, 1, (self._streams.count, -1)))
            joined = weighted(streams, (sigmoid(join) + self._streams.eps).unsqueeze(-1)).to(streams.dtype)
            spreading = (2 * sigmoid(spread)).unsqueeze(-1)

            def put_back(out: Tensor) -> Tensor:
                mixed = weighted(streams.unsqueeze(2), mixing.unsqueeze(-1))
                return (spreading * out.unsqueeze(1).float() + mixed).to(streams.dtype)

            return norm(joined), put_back

        return mix

    def _doubly_stochastic(self, scores: Tensor) -> Tensor:
        """Return positive matrices `[T, N, N]` whose rows and columns sum to 1, nearly."""
        eps = self._streams.eps
        shares = torch.exp(scores - scores.amax(-1, keepdim=True))
        matrix = shares / summed(shares, -1) + eps
        matrix = matrix / (summed(matrix, -2) + eps)
        for _ in range(self._streams.rounds - 1):
            matrix = matrix / (summed(matrix, -1) + eps)
            matrix = matrix / (summed(matrix, -2) + eps)
        return matrix

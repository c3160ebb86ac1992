"""How each kind of layer is cut into the shares of ranks: by heads, channels and inner features.

Layers that take in what was cut (`RowParallel`) are cut by their inputs, and, where ranks gather, by their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import TypeAlias

from forkpoint.errors import ConfigError
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, PartConfig
from forkpoint.models.cuts import Cut, Shares
from forkpoint.models.gated_delta_net import GDNConfig
from forkpoint.models.kimi_linear import KDAConfig
from forkpoint.models.latent_attention import LatentAttentionConfig
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba import MambaConfig
from forkpoint.models.mamba2_mixer import Mamba2Config
from forkpoint.models.moe import MoEConfig
from forkpoint.models.parallel import ParallelConfig
from forkpoint.models.short_conv import ShortConvConfig
from forkpoint.models.zamba2 import SharedConfig
from forkpoint.ops.ranks import Ranks

# By the last words of names, or the last one and a number behind it; None: whole on every rank.
Cuts: TypeAlias = dict[str, Cut | None]


def cut_model(config: ModelConfig, ranks: Ranks) -> tuple[ModelConfig, Shares]:
    """What one rank builds, and out of which parts of the weights. Raises ConfigError for what cannot be cut."""
    if ranks.size == 1:
        return config, Shares()
    cuts = dict[str, Mapping[str, Cut | None]]()

    def cut_layer(parts: Sequence[PartConfig], name: str) -> tuple[PartConfig, ...]:
        found = [cut_part(part, ranks, config.hidden_size) for part in parts]
        cuts[name] = {leaf: cut for _, own in found for leaf, cut in own.items()}
        return tuple(part for part, _ in found)

    layers = tuple(cut_layer(parts, f"model.layers.{i}") for i, parts in enumerate(config.layers))
    kept_hidden, drafting = config.draft_layer[:1], config.draft_layer[1:]  # hidden states are whole on every rank
    drafts = (*kept_hidden, *cut_layer(drafting, "mtp.layers.0"))
    head = Cut(0, ((config.vocab_size, 1),), padded=True)
    return replace(config, layers=layers, draft_layer=drafts), Shares(ranks, cuts, head)


@singledispatch
def cut_part(part: PartConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    """A rank's own part of a layer, and the cuts by the last words of its weights' names. Raises ConfigError."""
    raise ConfigError(f"tensor_parallel_size={ranks.size}: {type(part).__name__} layers cannot be cut; give 1")


@cut_part.register
def _attention(part: AttentionConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    dim, heads = part.head_dim, _share(part.num_heads, "query heads", ranks)
    kv_heads = _share(part.num_kv_heads, "KV heads", ranks, shared=part.qk_norm != "all")
    keys = _rows((part.num_kv_heads, dim))
    cuts = {"q_proj": _rows((part.num_heads, dim * (1 + part.gated))), "k_proj": keys, "v_proj": keys}
    return replace(part, num_heads=heads, num_kv_heads=kv_heads), cuts | _inward("o_proj", hidden_size, ranks)


@cut_part.register
def _latent_attention(part: LatentAttentionConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    heads = part.num_heads
    cuts = {
        "q_proj": _rows((heads, part.key_dim + part.shared_dim)),
        "kv_b_proj": _rows((heads, part.key_dim + part.value_dim)),
        "g_proj": _rows((heads, 1)),
    }
    own = replace(part, num_heads=_share(heads, "heads", ranks))
    return own, cuts | _inward("o_proj", hidden_size, ranks)


@cut_part.register
def _delta_net(part: GDNConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    shape = part.shape
    group = shape.num_v_heads // shape.num_k_heads
    keys, values, heads = (
        (shape.num_k_heads, shape.key_dim),
        (shape.num_v_heads, shape.value_dim),
        (shape.num_v_heads, 1),
    )
    mixed = _rows(keys, keys, values)
    cuts = {
        "in_proj_qkvz": _rows((shape.num_k_heads, 2 * (shape.key_dim + group * shape.value_dim))),
        "in_proj_ba": _rows((shape.num_k_heads, 2 * group)),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), mixed),
        **dict.fromkeys(("q_proj", "k_proj"), _rows(keys)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), _rows(values)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), _rows(heads)),
    }
    num_keys = _share(shape.num_k_heads, "linear key heads", ranks)
    own = replace(part, shape=replace(shape, num_k_heads=num_keys, num_v_heads=num_keys * group))
    return own, cuts | _inward(part.out, hidden_size, ranks)


@cut_part.register
def _per_key_delta_net(part: KDAConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    wide = (part.num_heads, part.head_dim)
    projections = [f"{name}_proj" for name in ("q", "k", "v", *(("f_b", "g_b") if part.narrow else ("f", "g")))]
    convolutions = [f"{name}_conv1d" for name in "qkv"]
    cuts = {
        **dict.fromkeys([*projections, *convolutions, "dt_bias"], _rows(wide)),
        "conv1d": _rows(wide, wide, wide),
        "b_proj": _rows((part.num_heads, 1)),
        "A_log": Cut(-2, ((part.num_heads, 1),)),
    }
    own = replace(part, num_heads=_share(part.num_heads, "linear heads", ranks))
    return own, cuts | _inward("o_proj", hidden_size, ranks)


@cut_part.register
def _mamba(part: MambaConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    channels = (part.channels, 1)
    cuts = {
        "in_proj": _rows(channels, channels),
        **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), _rows(channels)),
        **_inward("x_proj", part.rank + 2 * part.values, ranks),
        **_inward("out_proj", hidden_size, ranks),
    }
    return replace(part, channels=_share(part.channels, "channels", ranks)), cuts


@cut_part.register
def _mamba2(part: Mamba2Config, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    spec = part.spec
    keys, values, heads = (spec.num_k_heads, spec.key_dim), (spec.num_v_heads, spec.value_dim), (spec.num_v_heads, 1)
    cuts = {
        "in_proj": _rows(values, values, keys, keys, heads),
        "conv1d": _rows(values, keys, keys),
        **dict.fromkeys(("A_log", "dt_bias", "D"), _rows(heads)),
        **_inward("out_proj", hidden_size, ranks),
    }
    num_heads, groups = _share(spec.num_v_heads, "heads", ranks), _share(spec.num_k_heads, "groups", ranks, shared=True)
    norm_groups = 0
    if spec.num_k_heads % ranks.size:
        norm_groups = spec.num_k_heads  # of which each spans several ranks
    else:
        cuts[f"{part.name}.norm"] = _rows(values)
    own = replace(spec, num_k_heads=groups, num_v_heads=num_heads)
    return replace(part, spec=own, norm_groups=norm_groups), cuts


@cut_part.register
def _short_convolution(part: ShortConvConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    channels = (part.channels, 1)
    cuts = {"in_proj": _rows(channels, channels, channels), "conv": _rows(channels)}
    own = replace(part, channels=_share(part.channels, "channels", ranks))
    return own, cuts | _inward("out_proj", hidden_size, ranks)


@cut_part.register
def _mlp(part: MLPConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    inner = (part.intermediate_size, 1)
    cuts = {"gate_up_proj": _rows(inner, inner), **dict.fromkeys(("gate_proj", "up_proj"), _rows(inner))}
    own = replace(part, intermediate_size=_share(part.intermediate_size, "features of an MLP", ranks))
    return own, cuts | _inward("down_proj", hidden_size, ranks)


@cut_part.register
def _experts(part: MoEConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    """Each expert by its inner features; where ranks gather, by what it gives alone, as one operation does the rest."""
    kinds = {"experts": part.intermediate_size, part.shared_name: part.shared_intermediate_size}
    cuts = Cuts()
    for name, size in kinds.items():
        given = ranks.cuts_rows(part.latent_size or hidden_size)
        cuts[f"{name}.down_proj"] = (Cut(-2) if given else None) if ranks.gathers else Cut(-1)
        features = None if ranks.gathers else Cut(-2, ((size, 1),))
        cuts |= dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), features)
        cuts[f"{name}.gate_up_proj"] = None if ranks.gathers else Cut(-2, ((size, 1), (size, 1)))
    if ranks.gathers:
        return part, cuts
    inner, shared = (_share(size, "features of an expert", ranks) if size else 0 for size in kinds.values())
    if part.rule.num_shared != -(-shared // inner):
        raise ConfigError(f"tensor_parallel_size={ranks.size}: the shared expert cannot be cut as the others are")
    return replace(part, intermediate_size=inner, shared_intermediate_size=shared), cuts


@cut_part.register
def _shared_transformer(part: SharedConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    """An adapter's second matrix gives what the layer's own does; the layer of the first use has all of them."""
    attention, cuts = cut_part(part.attention, ranks, hidden_size)
    mlp, inner = cut_part(MLPConfig(part.intermediate_size), ranks, hidden_size)
    assert isinstance(attention, AttentionConfig) and isinstance(mlp, MLPConfig)
    cuts |= inner
    cuts |= {f"linear_{name}_adapter_list.1": cuts[f"{name}_proj"] for name in "qkv"}
    cuts["gate_up_proj_adapter_list.1"] = cuts["gate_up_proj"]
    return replace(part, attention=attention, intermediate_size=mlp.intermediate_size), cuts


@cut_part.register
def _parts(part: ParallelConfig, ranks: Ranks, hidden_size: int) -> tuple[PartConfig, Cuts]:
    found = [cut_part(inner, ranks, hidden_size) for inner in part.parts]
    cuts = {name: cut for _, own in found for name, cut in own.items()}
    return replace(part, parts=[inner for inner, _ in found]), cuts


def _share(count: int, what: str, ranks: Ranks, shared: bool = False) -> int:
    """How many each rank has; with `shared` fewer than there are ranks belong to several."""
    if count % ranks.size and not (shared and ranks.size % count == 0):
        raise ConfigError(f"tensor_parallel_size={ranks.size} does not divide the model's {count} {what}")
    return max(1, count // ranks.size)


def _rows(*sections: tuple[int, int]) -> Cut:
    return Cut(0, sections)


def _inward(name: str, num_rows: int, ranks: Ranks) -> Cuts:
    """Of a RowParallel layer."""
    if not ranks.gathers:
        return {name: Cut(-1)}
    return {name: Cut(0)} if ranks.cuts_rows(num_rows) else {}

"""Operations that a prompt costs, from shapes alone."""

from __future__ import annotations

from forkpoint.models.config import ModelConfig


def flops_per_token(config: ModelConfig) -> int:
    """Matrix-product operations per prompt token, attention scores and the output head apart."""
    total = 0
    for layer, kind in enumerate(config.layer_types):
        mixer = _gdn_weights(config) if kind == "linear_attention" else _attention_weights(config)
        total += 2 * (mixer + _mlp_weights(config, layer))
    return total


def flops_per_pair(config: ModelConfig) -> int:
    """Operations per (query token, key token) pair, all attention layers together."""
    num_attention = sum(kind != "linear_attention" for kind in config.layer_types)
    return 4 * config.num_heads * config.head_dim * num_attention


def _attention_weights(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * config.head_dim * heads


def _gdn_weights(config: ModelConfig) -> int:
    shape = config.gdn
    assert shape is not None
    values = shape.num_v_heads * shape.value_dim
    return config.hidden_size * (shape.mixed_dim + 2 * values + 2 * shape.num_v_heads)


def _mlp_weights(config: ModelConfig, layer: int) -> int:
    moe = config.moe
    if moe is None or not config.is_sparse(layer):
        return 3 * config.hidden_size * config.intermediate_size
    width = moe.top_k * moe.intermediate_size + moe.shared_intermediate_size
    return 3 * config.hidden_size * width

"""What each layer of a model keeps, from its config alone."""

from __future__ import annotations

from forkpoint.cache.layout import KVSpec, StateSpec
from forkpoint.models.config import ModelConfig


def kv_specs(config: ModelConfig) -> tuple[KVSpec, ...]:
    """Keys and values of the attention layers, in order."""
    return tuple(
        KVSpec(
            config.num_kv_heads,
            config.head_dim,
            config.head_dim,
            config.dtype,
            config.window if kind == "sliding_attention" else None,
        )
        for kind in config.layer_types
        if kind != "linear_attention"
    )


def state_specs(config: ModelConfig, state_dtype: str) -> tuple[StateSpec, ...]:
    """States of the recurrent layers, in order."""
    shape = config.gdn
    if shape is None:
        return ()
    spec = StateSpec(
        conv_shape=(config.conv_width - 1, shape.mixed_dim),
        conv_dtype=config.dtype,
        matrix_shape=(shape.num_v_heads, shape.value_dim, shape.key_dim),
        matrix_dtype=state_dtype,
    )
    return (spec,) * sum(kind == "linear_attention" for kind in config.layer_types)

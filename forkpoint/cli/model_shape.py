"""Reads a model folder's sizes for the simulator."""

from __future__ import annotations

from pathlib import Path

from forkpoint.models.moe import MoEConfig
from forkpoint.models.quantization import WeightFormat
from forkpoint.models.registry import load_config
from forkpoint.sim.shape import FOUR_BIT_WEIGHT_BYTES, FP8_WEIGHT_BYTES, WEIGHT_BYTES, ModelShape


def read_shape(
    folder: Path, kv_cache_dtype: str = "auto", state_dtype: str = "float32", quantization: str | None = None
) -> ModelShape:
    """Read a model's sizes for the simulator from `config.json` alone, kept in these dtypes.

    Raises ModelFolderError and UnsupportedModelError.
    """
    config = load_config(folder, kv_cache_dtype=kv_cache_dtype, state_dtype=state_dtype, quantization=quantization)
    sparse = config.all_of(MoEConfig)
    experts = sum(part.routed_weights(config.hidden_size) for part in sparse)
    num_experts, top_k = (sparse[0].num_experts, sparse[0].rule.top_k) if sparse else (1, 0)
    return ModelShape(
        name=folder.name,
        layers=config.layer_specs,
        hidden_size=config.hidden_size,
        num_weights=config.flops_per_token // 2 - experts * top_k // num_experts,
        head_weights=config.vocab_size * config.hidden_size,
        flops_per_pair=config.flops_per_pair,
        num_expert_weights=experts,
        num_experts=num_experts,
        top_k=top_k,
        weight_bytes_each=_weight_bytes(config.quantization),
    )


def _weight_bytes(stored: WeightFormat | None) -> float:
    """Return the bytes per weight of the format that most matrices have."""
    if stored is None:
        return WEIGHT_BYTES
    return FP8_WEIGHT_BYTES if stored.packing is None else FOUR_BIT_WEIGHT_BYTES

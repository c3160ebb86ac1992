"""Sizes of published models that the cost model needs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.layer_spec import DELTA_RULE_OPERATIONS, KVSpec, LayerSpec, StateSpec, TensorSpec, keys_in_fp8
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ConfigError

WEIGHT_BYTES: Final = 2  # bfloat16
FP8_WEIGHT_BYTES: Final = 1  # without the scales, one per 128 x 128 weights
FOUR_BIT_WEIGHT_BYTES: Final = 0.5  # without the scales
# Bytes that elementwise kernels and convolutions move per token and layer, in hidden vectors (gpu_ops.md).
HIDDEN_VECTORS_MOVED: Final = 28


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes.

    `num_weights` are used by every token, without the output head. `num_expert_weights` are all routed experts
    together; a token uses `top_k` of `num_experts`. `flops_per_pair` counts one query attending to one key, over all
    attention layers. A weight takes `weight_bytes_each`, a weight of the head WEIGHT_BYTES.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_weights: int
    head_weights: int
    flops_per_pair: int
    num_expert_weights: int = 0
    num_experts: int = 1
    top_k: int = 0
    weight_bytes_each: float = WEIGHT_BYTES

    @cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout.create(self.layers)

    @cached_property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(group.block_bytes for group in self.layout.groups) // BLOCK_SIZE

    @cached_property
    def flops_per_token(self) -> int:
        """Matrix-product operations per prompt token, without attention scores and the output head."""
        return 2 * (self.num_weights + self.num_expert_weights * self.top_k // self.num_experts)

    @cached_property
    def state_flops_per_token(self) -> int:
        """Operations of the chunked recurrences per prompt token in all layers."""
        return sum(state.flops_per_token for state in self.layout.states)

    @cached_property
    def moved_bytes_per_token(self) -> int:
        """Bytes that elementwise kernels move per token in all layers."""
        return HIDDEN_VECTORS_MOVED * self.hidden_size * WEIGHT_BYTES * len(self.layers)

    def weight_bytes(self, num_tokens: int) -> float:
        """Return the expected bytes of weights that a step reads, without the head.

        The step reads all dense weights, and the experts that some of `num_tokens` tokens chose.
        """
        met = 1 - (1 - self.top_k / self.num_experts) ** num_tokens
        return self.weight_bytes_each * (self.num_weights + self.num_expert_weights * met)

    def kept_as(self, kv_cache_dtype: str, state_dtype: str, quantization: str | None) -> ModelShape:
        """Return the shape with other dtypes of keys and values, recurrent matrices and weights.

        Only `fp8` changes keys and values, or weights (`quantization`). UnsupportedModelError if attention cannot read
        it.
        """
        layers = tuple(tuple(_in_state_dtype(spec, state_dtype) for spec in layer) for layer in self.layers)
        weight_bytes: float = self.weight_bytes_each
        if kv_cache_dtype == "fp8":
            layers = tuple(map(keys_in_fp8, layers))
        if quantization == "fp8":
            weight_bytes = FP8_WEIGHT_BYTES
        return replace(self, layers=layers, weight_bytes_each=weight_bytes)

    @cached_property
    def recompute_cost(self) -> RecomputeCost:
        """The recompute cost per token that the engine's eviction policy uses."""
        return RecomputeCost(self.flops_per_token, self.flops_per_pair)


def _in_state_dtype(spec: KVSpec | StateSpec, dtype: str) -> KVSpec | StateSpec:
    if isinstance(spec, KVSpec):
        return spec
    return replace(
        spec, tensors=tuple(replace(kept, dtype=dtype) if kept.name == "matrix" else kept for kept in spec.tensors)
    )


def _delta_net(k_heads: int, v_heads: int, dim: int = 128) -> LayerSpec:
    conv = TensorSpec("conv", (3, (2 * k_heads + v_heads) * dim), "bfloat16")
    matrix = TensorSpec("matrix", (v_heads, dim, dim), "float32")
    return (StateSpec((conv, matrix), DELTA_RULE_OPERATIONS * matrix.num_values),)


def _qwen3_5(
    name: str, num_layers: int, hidden_size: int, kv_heads: int, mlp_columns: int, **experts: int
) -> ModelShape:
    """Return a Qwen3.5 shape: every fourth layer is attention with 16 heads of 256.

    `mlp_columns` are those of one layer's MLP that every token uses; `experts` are ModelShape's fields of routed
    experts.
    """
    attending, linear = num_layers // 4, num_layers - num_layers // 4
    keys = KVSpec.of(kv_heads, 256, 256, "bfloat16", takes_fp8=True)
    columns = num_layers * mlp_columns + attending * 256 * (3 * 16 + 2 * kv_heads) + linear * (8192 + 2 * 4096 + 2 * 32)
    return ModelShape(
        name=name,
        layers=((keys,),) * attending + (_delta_net(16, 32),) * linear,
        hidden_size=hidden_size,
        num_weights=hidden_size * columns,
        head_weights=248_320 * hidden_size,
        flops_per_pair=attending * 4 * 16 * 256,
        **experts,
    )


QWEN3_5_9B = _qwen3_5("Qwen3.5-9B", 32, 4096, 4, 3 * 12288)
_EXPERTS = {"num_expert_weights": 40 * 256 * 3 * 2048 * 512, "num_experts": 256, "top_k": 8}
QWEN3_5_35B = _qwen3_5("Qwen3.5-35B-A3B", 40, 2048, 2, 3 * 512 + 256, **_EXPERTS)
KIMI_LINEAR = ModelShape(
    name="Kimi-Linear-48B-A3B",
    layers=((KVSpec((TensorSpec("latent", (1, 512 + 64), "bfloat16"),)),),) * 7 + (_delta_net(32, 32),) * 20,
    hidden_size=2304,
    num_weights=3 * 2304 * 9216  # the first layer is dense
    + 26 * 2304 * (3 * 1024 + 256)
    + 7 * (2304 * (32 * 192 + 576) + 512 * 32 * 256 + 4096 * 2304)
    + 20 * (4 * 2304 * 4096 + 2 * 128 * (2304 + 4096) + 2304 * 32),
    head_weights=163_840 * 2304,
    flops_per_pair=7 * 2 * 32 * (192 + 128),
    num_expert_weights=26 * 256 * 3 * 2304 * 1024,
    num_experts=256,
    top_k=8,
)

SHAPES: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {"qwen3.5-9b": QWEN3_5_9B, "qwen3.5-35b-a3b": QWEN3_5_35B, "kimi-linear": KIMI_LINEAR}
)


def find_shape(name: str) -> ModelShape:
    """Return the preset of that name, ignoring case. Raises ConfigError if there is none."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ConfigError(
            f"no model shape {name!r}; give one of {', '.join(SHAPES)}, a model folder, or an id on the hub"
        )
    return shape

"""Layouts of real models, from their published shapes: bytes only, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, StateSpec, TensorSpec
from forkpoint.cache.layout import CacheLayout


def state(
    conv: tuple[int, ...] | None, matrix: tuple[int, ...] | None, conv_dtype: str = "bfloat16", dtype: str = "float32"
) -> StateSpec:
    """A convolution's window and a recurrence's matrix, or one of them."""
    kept = (("conv", conv, conv_dtype), ("matrix", matrix, dtype))
    return StateSpec(tuple(TensorSpec(name, shape, kind) for name, shape, kind in kept if shape is not None))


def layout_of(specs: Sequence[KVSpec | StateSpec]) -> CacheLayout:
    """Each spec is a layer's."""
    layers: list[LayerSpec] = [(spec,) for spec in specs]
    return CacheLayout.create(layers)


def delta_net(k_heads: int, v_heads: int, k_dim: int = 128, v_dim: int = 128) -> StateSpec:
    """Gated delta net, convolution of width 4 over queries, keys and values."""
    width = 2 * k_heads * k_dim + v_heads * v_dim
    return state((3, width), (v_heads, v_dim, k_dim))


def mamba2(heads: int, head_dim: int, state_dim: int, groups: int) -> StateSpec:
    width = heads * head_dim + 2 * groups * state_dim
    return state((3, width), (heads, head_dim, state_dim))


def mamba1(width: int) -> StateSpec:
    return state((3, width), (width, 16))


def attention(heads: int, dim: int) -> KVSpec:
    return KVSpec.of(heads, dim, dim, "bfloat16", takes_fp8=True)


def layout(num_states: int, state: StateSpec, num_kv: int, kv: KVSpec) -> CacheLayout:
    return layout_of([kv] * num_kv + [state] * num_states)


LATENT = KVSpec((TensorSpec("latent", (1, 576), "bfloat16"),))  # MLA keeps one row of 512 + 64

# Qwen3.8-Flash-Next: an index key of 128 for four tokens next to keys and values, the inputs of a pool of index keys,
# those of a dilated convolution over four streams, and the last two tokens.
QUERIED = KVSpec((*attention(2, 256).tensors, TensorSpec("index", (1, 32), "bfloat16")))
MEANS = StateSpec((TensorSpec("window", (3, 128), "bfloat16"),))
NGRAMS = StateSpec((TensorSpec("ngram_conv", (9, 4 * 2560), "bfloat16"), TensorSpec("window", (2, 1), "float32")))

# GLM-5.3: latents without positions, an index key of 128 for four tokens, and the inputs of a pool of index keys.
INDEXED = KVSpec((TensorSpec("latent", (1, 512), "bfloat16"), TensorSpec("index", (1, 32), "bfloat16")))
POOL = StateSpec((TensorSpec("window", (3, 256), "bfloat16"),))

REAL_LAYOUTS = {
    "Qwen3-Next-80B-A3B": layout(36, delta_net(16, 32), 12, attention(2, 256)),
    "Qwen3.5-0.8B": layout(18, delta_net(16, 16), 6, attention(2, 256)),
    "Qwen3.5-9B": layout(24, delta_net(16, 32), 8, attention(4, 256)),
    "Qwen3.5-27B": layout(48, delta_net(16, 48), 16, attention(4, 256)),
    "Qwen3.5-35B-A3B": layout(30, delta_net(16, 32), 10, attention(2, 256)),
    "Qwen3.5-122B-A10B": layout(36, delta_net(16, 64), 12, attention(2, 256)),
    "Qwen3.5-397B-A17B": layout(45, delta_net(16, 64), 15, attention(2, 256)),
    "OLMo-Hybrid-7B": layout(24, delta_net(30, 30, 96, 192), 8, attention(30, 128)),
    "Kimi-Linear-48B-A3B": layout(20, delta_net(32, 32), 7, LATENT),
    "Nemotron-H-8B": layout(24, mamba2(128, 64, 128, 8), 4, attention(8, 128)),
    "Nemotron-3-Nano-30B-A3B": layout(23, mamba2(64, 64, 128, 8), 6, attention(2, 128)),
    "Granite-4.0-H-Small": layout(36, mamba2(128, 64, 128, 1), 4, attention(8, 128)),
    "Jamba-1": layout(28, mamba1(8192), 4, attention(8, 128)),
    "Mamba-2.8B": layout_of([mamba1(5120)] * 64),
    "Mamba2-2.7B": layout_of([mamba2(80, 64, 128, 1)] * 64),
    "Bamba-9B": layout(29, mamba2(128, 64, 128, 1), 3, attention(8, 128)),
    "Falcon-H1-0.5B": layout(36, mamba2(24, 64, 128, 1), 36, attention(2, 64)),
    "Zamba2-7B": layout(81, mamba2(112, 64, 64, 2), 13, attention(32, 224)),
    "Ling-2.6-flash": layout(28, state(None, (32, 128, 128)), 4, LATENT),
    "Ling-3.0-flash": layout(35, delta_net(32, 32), 7, LATENT),
    "Qwen3.8-Flash-Next": layout_of([QUERIED] * 12 + [MEANS] * 12 + [NGRAMS] + [delta_net(16, 48)] * 36),
    "GLM-5.3-Flash": layout_of([INDEXED] * 11 + [POOL] * 11 + [delta_net(64, 64)] * 34),
    "Granite-4.0-H-Tiny": layout(36, mamba2(48, 64, 128, 1), 4, attention(4, 128)),
    "Granite-4.0-H-350M": layout(28, mamba2(48, 32, 128, 1), 4, attention(4, 64)),
    "Llama-3.1-8B": layout_of([attention(8, 128)] * 32),
    "Ministral-8B": layout_of([attention(8, 128)] * 36),  # its window is as long as its context
    "Qwen3-8B": layout_of([attention(8, 128)] * 36),
    "FalconMamba-7B": layout_of([mamba1(8192)] * 64),
    "LFM2-1.2B": layout(10, state((2, 2048), None), 6, attention(8, 64)),
    "LFM3-1.7B": layout_of(
        [attention(4, 128)] * 6 + [replace(attention(4, 128), window=256)] * 5 + [state((6, 2048), None)] * 13
    ),
    "AliceAI-80B-A3B": layout(36, delta_net(32, 32), 12, attention(2, 256)),
    "Lara-4-Mini": layout_of(
        [attention(4, 128)] * 7 + [replace(attention(4, 128), window=512)] * 13 + [delta_net(8, 16)] * 14
    ),
    "LFM2-8B-A1B": layout(18, state((2, 2048), None), 6, attention(8, 64)),
}

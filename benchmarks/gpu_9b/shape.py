"""The sizes of the measured model, and of what its layers store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.model131m import LINEAR, HybridShape

SHAPE_9B = HybridShape(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=32,
    attention_interval=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    num_key_heads=16,
    num_value_heads=32,
    state_dim=128,
    conv_width=4,
    max_position_embeddings=32_768,
)
BF16_BYTES, FP32_BYTES = 2, 4


def text_fields(shape: HybridShape) -> dict[str, Any]:
    """Return the fields of config.json that Qwen3-Next and the text part of Qwen3.5 share."""
    return {
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "layer_types": list(shape.layer_types),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "linear_num_key_heads": shape.num_key_heads,
        "linear_num_value_heads": shape.num_value_heads,
        "linear_key_head_dim": shape.state_dim,
        "linear_value_head_dim": shape.state_dim,
        "linear_conv_kernel_dim": shape.conv_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 0,
    }


def write_config(folder: Path, shape: HybridShape) -> Path:
    """Write a folder with only a config.json, that of a dense Qwen3-Next of this shape. `load_format="dummy"` needs no
    more."""
    layers = list(range(shape.num_layers))
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **text_fields(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "num_experts": 0,
        "mlp_only_layers": layers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def matrices(shape: HybridShape) -> list[tuple[int, int]]:
    """Return (rows, columns) of every weight matrix that each token is multiplied with, layer by layer, without the
    output head."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mixed = 2 * shape.key_size + shape.value_size
    found = []
    for kind in shape.layer_types:
        if kind == LINEAR:
            found += [(mixed + shape.value_size + 2 * shape.num_value_heads, hidden), (hidden, shape.value_size)]
        else:
            found += [(2 * heads + 2 * kv_heads, hidden), (hidden, heads)]
        found += [(2 * inner, hidden), (hidden, inner)]
    return found


def kv_bytes_per_token(shape: HybridShape) -> int:
    """Keys and values of one token, all attention layers, bf16."""
    num_attention = sum(kind != LINEAR for kind in shape.layer_types)
    return num_attention * 2 * shape.num_kv_heads * shape.head_dim * BF16_BYTES


def state_bytes(shape: HybridShape) -> int:
    """One sequence's state, all recurrent layers: bf16 conv windows and fp32 matrices."""
    num_recurrent = sum(kind == LINEAR for kind in shape.layer_types)
    window = (shape.conv_width - 1) * (2 * shape.key_size + shape.value_size) * BF16_BYTES
    return num_recurrent * (window + shape.value_size * shape.state_dim * FP32_BYTES)


def attention_flops_per_pair(shape: HybridShape) -> int:
    """Operations per (query token, key token) pair, all attention layers."""
    num_attention = sum(kind != LINEAR for kind in shape.layer_types)
    return 4 * shape.num_heads * shape.head_dim * num_attention

"""The 131 M-parameter hybrid checkpoint of the CPU benchmarks: Qwen3.5's text layout with random weights.

Each layer's gates are drawn for slow decay, so that the recurrent state decides the logits: on weights from the
usual initialisation a wrong state barely shows, and a benchmark of a wrong answer is worth nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

LINEAR = "linear_attention"
FULL = "full_attention"
GAIN = 1.6  # of a projection's output spread over its input's; large enough that mixers outweigh the residual


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Sizes of a Qwen3.5-like text model. Every `attention_interval`-th layer attends, the others recur."""

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    attention_interval: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 128
    num_key_heads: int = 6
    num_value_heads: int = 12
    state_dim: int = 128
    conv_width: int = 4
    max_position_embeddings: int = 32768

    @property
    def layer_types(self) -> tuple[str, ...]:
        kinds = (LINEAR,) * (self.attention_interval - 1) + (FULL,)
        return tuple(kinds[i % self.attention_interval] for i in range(self.num_layers))

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.state_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.state_dim


SHAPE_131M = HybridShape()


def config_json(shape: HybridShape) -> dict[str, object]:
    """Return the contents of config.json, as transformers' qwen3_5_text and vLLM's Qwen3_5ForCausalLM read them."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": shape.attention_interval,
        "layer_types": list(shape.layer_types),
        "linear_conv_kernel_dim": shape.conv_width,
        "linear_key_head_dim": shape.state_dim,
        "linear_value_head_dim": shape.state_dim,
        "linear_num_key_heads": shape.num_key_heads,
        "linear_num_value_heads": shape.num_value_heads,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": True,
    }


def weights(shape: HybridShape, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and bf16 tensors of the checkpoint, drawn from one generator. The embedding is also the output
    head."""
    rng = torch.Generator().manual_seed(seed)
    size = shape.hidden_size

    def linear(rows: int, cols: int, gain: float = GAIN) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=rng) * (gain / math.sqrt(cols))).bfloat16()

    def near_zero(count: int) -> torch.Tensor:
        return (torch.randn(count, generator=rng) * 0.05).bfloat16()

    def between(low: float, high: float, *dims: int) -> torch.Tensor:
        return (torch.rand(*dims, generator=rng) * (high - low) + low).bfloat16()

    yield "model.embed_tokens.weight", linear(shape.vocab_size, size, 1.0)
    for index, kind in enumerate(shape.layer_types):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", near_zero(size)
        yield layer + "post_attention_layernorm.weight", near_zero(size)
        for name in ("gate_proj", "up_proj"):
            yield layer + f"mlp.{name}.weight", linear(shape.intermediate_size, size, 1.0)
        yield layer + "mlp.down_proj.weight", linear(size, shape.intermediate_size, 1.0)
        if kind == FULL:
            mixer, heads = layer + "self_attn.", shape.num_heads * shape.head_dim
            yield mixer + "q_proj.weight", linear(2 * heads, size)
            yield mixer + "k_proj.weight", linear(shape.num_kv_heads * shape.head_dim, size)
            yield mixer + "v_proj.weight", linear(shape.num_kv_heads * shape.head_dim, size)
            yield mixer + "o_proj.weight", linear(size, heads)
            yield mixer + "q_norm.weight", near_zero(shape.head_dim)
            yield mixer + "k_norm.weight", near_zero(shape.head_dim)
            continue
        mixer, conv_dim = layer + "linear_attn.", 2 * shape.key_size + shape.value_size
        yield mixer + "in_proj_qkv.weight", linear(conv_dim, size)
        yield mixer + "in_proj_z.weight", linear(shape.value_size, size)
        yield mixer + "in_proj_b.weight", linear(shape.num_value_heads, size, 1.0)
        yield mixer + "in_proj_a.weight", linear(shape.num_value_heads, size, 0.3)
        yield mixer + "conv1d.weight", between(-0.5, 0.5, conv_dim, 1, shape.conv_width)
        yield mixer + "dt_bias", between(-3.0, -1.0, shape.num_value_heads)
        yield mixer + "A_log", between(-4.0, -1.0, shape.num_value_heads)
        yield mixer + "norm.weight", 1 + near_zero(shape.state_dim)
        yield mixer + "out_proj.weight", linear(size, shape.value_size)
    yield "model.norm.weight", near_zero(size)


def write_checkpoint(folder: Path, shape: HybridShape = SHAPE_131M, seed: int = 0) -> int:
    """Write config.json, model.safetensors and a word-level tokenizer. Returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(shape), indent=2) + "\n")
    tensors = dict(weights(shape, seed))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(folder, shape.vocab_size)
    return sum(tensor.numel() for tensor in tensors.values())


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose token i is the word `ti`, for engines that need a tokenizer."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count = write_checkpoint(args.folder, seed=args.seed)
    print(f"{count / 1e6:.1f} M parameters in {args.folder}")


if __name__ == "__main__":
    main()

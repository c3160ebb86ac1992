"""A small Qwen3-Next-architecture checkpoint with random weights, made on the spot.

Default initialisation would make a model that hardly reads its recurrent state, on which a wrong state goes
unseen. Here the states decay slowly and the projections are large, so that a lost or misplaced state changes
the answer at once.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forkpoint.errors import ConfigError

FORMAT = 1  # changes whenever the files that a spec gives change
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NUM_SPECIAL = 3
CHAT_TEMPLATE = (
    "{%- if tools %}"
    "<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (tools and loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModelSpec:
    """Sizes of the model. Every `attention_every`-th layer is attention, the others are gated delta nets."""

    hidden_size: int = 256
    num_layers: int = 8
    attention_every: int = 4
    intermediate_size: int = 768
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_k_heads: int = 4
    num_v_heads: int = 8
    state_dim: int = 64
    max_position_embeddings: int = 8192
    seed: int = 0

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0


def make_random_model(folder: str | Path | None = None, spec: RandomModelSpec | None = None) -> Path:
    """Write the checkpoint, tokenizer and chat template unless they exist. Return the folder.

    The default folder is in the user's cache (XDG_CACHE_HOME). Raises ConfigError if it cannot be written.
    """
    spec = spec or RandomModelSpec()
    path = Path(folder) if folder is not None else default_folder()
    stamp = path / "demo.json"
    identity = {"format": FORMAT, **{name: getattr(spec, name) for name in spec.__dataclass_fields__}}
    if stamp.is_file() and json.loads(stamp.read_text()) == identity:
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_weights(path, spec)
        _write_tokenizer(path)
        (path / "config.json").write_text(json.dumps(_config(spec), indent=2))
        stamp.write_text(json.dumps(identity))  # last: a folder without it is unfinished
    except OSError as error:
        raise ConfigError(f"cannot write the demo model to {path}: {error}; name another folder") from error
    return path


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forkpoint" / f"demo-model-{FORMAT}"


def _byte_vocabulary() -> list[str]:
    """Return the byte-level alphabet in byte order: entry `b` spells byte `b`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_vocabulary())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=IM_END, pad_token=END_OF_TEXT)
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, IM_END, END_OF_TEXT]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


def _config(spec: RandomModelSpec) -> dict[str, Any]:
    layers = range(spec.num_layers)
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "float32",
        "vocab_size": 256 + NUM_SPECIAL,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "layer_types": ["full_attention" if spec.is_attention(i) else "linear_attention" for i in layers],
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "linear_num_key_heads": spec.num_k_heads,
        "linear_num_value_heads": spec.num_v_heads,
        "linear_key_head_dim": spec.state_dim,
        "linear_value_head_dim": spec.state_dim,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": spec.max_position_embeddings,
        "num_experts": 0,
        "mlp_only_layers": list(layers),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 257,
    }


def _write_weights(path: Path, spec: RandomModelSpec) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(spec.seed)
    weights: dict[str, npt.NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = random.standard_normal((rows, columns), np.float32)
        weights[name] = values * np.float32(gain / np.sqrt(columns))

    hidden = spec.hidden_size
    vocab = 256 + NUM_SPECIAL
    weights["model.embed_tokens.weight"] = random.standard_normal((vocab, hidden), np.float32)
    weights["model.norm.weight"] = np.zeros(hidden, np.float32)
    matrix("lm_head.weight", vocab, hidden, gain=3.0)
    readable = np.zeros((vocab, 1), np.float32)
    readable[32:127] = 1.0  # all other logits are 0, which greedy sampling never takes: answers stay printable
    weights["lm_head.weight"] *= readable
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.zeros(hidden, np.float32)
        if spec.is_attention(layer):
            _attention(prefix + "self_attn.", spec, weights, matrix)
        else:
            _delta_net(prefix + "linear_attn.", spec, weights, matrix, random)
        matrix(f"{prefix}mlp.gate_proj.weight", spec.intermediate_size, hidden)
        matrix(f"{prefix}mlp.up_proj.weight", spec.intermediate_size, hidden)
        matrix(f"{prefix}mlp.down_proj.weight", hidden, spec.intermediate_size)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _attention(prefix: str, spec: RandomModelSpec, weights: dict[str, Any], matrix: Any) -> None:
    width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    matrix(f"{prefix}q_proj.weight", 2 * width, spec.hidden_size)
    matrix(f"{prefix}k_proj.weight", kv_width, spec.hidden_size)
    matrix(f"{prefix}v_proj.weight", kv_width, spec.hidden_size)
    matrix(f"{prefix}o_proj.weight", spec.hidden_size, width, gain=4.0)
    for name in ("q_norm", "k_norm"):
        weights[f"{prefix}{name}.weight"] = np.ones(spec.head_dim, np.float32)


def _delta_net(
    prefix: str, spec: RandomModelSpec, weights: dict[str, Any], matrix: Any, random: np.random.Generator
) -> None:
    heads = spec.num_v_heads
    key_width, value_width = spec.num_k_heads * spec.state_dim, heads * spec.state_dim
    matrix(f"{prefix}in_proj_qkvz.weight", 2 * key_width + 2 * value_width, spec.hidden_size)
    matrix(f"{prefix}in_proj_ba.weight", 2 * heads, spec.hidden_size)
    matrix(f"{prefix}out_proj.weight", spec.hidden_size, value_width, gain=2.0)
    mixed = 2 * key_width + value_width
    weights[f"{prefix}conv1d.weight"] = random.standard_normal((mixed, 1, 4), np.float32) * np.float32(0.5)
    weights[f"{prefix}norm.weight"] = np.ones(spec.state_dim, np.float32)
    # a state keeps exp(-exp(A_log) * softplus(a + dt_bias)) of itself per token: nearly all
    weights[f"{prefix}A_log"] = random.uniform(-4.0, -1.0, heads).astype(np.float32)
    weights[f"{prefix}dt_bias"] = random.uniform(-3.0, -1.0, heads).astype(np.float32)

"""The sizes of the model, and the config.json that contains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense Qwen3-Next: every `attention_every`-th layer attends, the others are gated delta nets."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 12
    attention_every: int = 4
    intermediate_size: int = 768
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_k_heads: int = 2
    num_v_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    rotary_share: float = 0.25
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_len: int = 8192

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        return tuple(
            "full_attention" if (i + 1) % self.attention_every == 0 else "linear_attention"
            for i in range(self.num_layers)
        )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    @property
    def keys_size(self) -> int:
        """Width of all keys (and of all queries) of a delta net."""
        return self.num_k_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_v_heads * self.value_dim

    def hf_config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """Return config.json, as transformers and forkpoint read it."""
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_share,
            },
            "max_position_embeddings": self.max_len,
            "num_experts": 0,
            "mlp_only_layers": list(range(self.num_layers)),
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelShape:
        """Return the shape in a config.json that `hf_config` wrote."""
        types = config["layer_types"]
        rope = config["rope_parameters"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            attention_every=types.index("full_attention") + 1,
            intermediate_size=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_k_heads=config["linear_num_key_heads"],
            num_v_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
            rotary_share=rope["partial_rotary_factor"],
            rope_theta=rope["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            max_len=config["max_position_embeddings"],
        )

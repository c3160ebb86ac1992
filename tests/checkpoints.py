"""Tiny random Hugging Face checkpoints whose states matter, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.alice_models import AliceAIConfig, AliceAIForCausalLM
from tests.lightning_models import BailingMoeV2_5Config, BailingMoeV2_5ForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
HEAD = {"head_dim": 32}
DENSE = {"intermediate_size": 96}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "state_size": 12,
    "time_step_rank": 6,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 64}
# None of them 1, which hides a multiplier.
GRANITE = {
    **COMMON,
    **MAMBA2,
    "intermediate_size": 32,
    "shared_intermediate_size": 96,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.7,
    "logits_scaling": 0.6,
    "residual_multiplier": 0.5,
}
KIMI = {
    **COMMON,
    **DENSE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LIGHTNING = {
    **COMMON,
    **DENSE,
    "num_hidden_layers": 5,  # the last is outside of groups
    "head_dim": 16,
    "group_norm_size": 2,
    "layer_group_size": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "n_group": 2,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GLM = {
    **{name: value for name, value in KIMI.items() if name not in ("num_local_experts", "qk_rope_head_dim")},
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 40,
    "swiglu_limit": 0.5,
    "hc_sinkhorn_iters": 3,
    "index_topk": 24,
    "index_kpool": 4,
    "index_n_heads": 12,  # pools whose scores are all 0 are rare
    "index_head_dim": 16,
}
QWEN4 = {
    **COMMON,
    **HEAD,
    **GDN,
    **MOE,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "output_gate_type": "sigmoid",
    "hc_count": 3,
    "hc_lowrank": 24,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 48,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 12,  # pools whose scores are all 0 are rare
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "eos_token_id": 9,
}
ALICE = {
    "block_attn_res_block_size": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _multimodal(**extra: Any) -> Any:
    text = {**COMMON, **HEAD, **GDN, **MOE, "model_type": "qwen3_5_moe_text", **extra}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=dict(VISION))
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def _glm5_next(**extra: Any) -> Any:
    vision = {name: VISION[name] for name in VISION if name != "num_position_embeddings"}
    text = {**GLM, "model_type": "glm5_next_text", **extra}
    config = transformers.Glm5NextConfig(text_config=text, vision_config={**vision, "projection_intermediate_size": 16})
    return transformers.Glm5NextForConditionalGeneration(config)


# Family -> a function that makes the model; keyword arguments replace fields of its config.
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **x: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, **DENSE, **x})),
    "mistral": lambda **x: transformers.MistralForCausalLM(
        transformers.MistralConfig(**{**COMMON, **HEAD, **DENSE, "sliding_window": 70, **x})
    ),
    "qwen3": lambda **x: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**COMMON, **HEAD, **DENSE, **x})),
    "qwen3_next": lambda **x: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**{**COMMON, **HEAD, **DENSE, **GDN, "num_experts": 0, **x})
    ),
    "qwen3_next_moe": lambda **x: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**{**COMMON, **HEAD, **DENSE, **GDN, **MOE, **x})
    ),
    "qwen3_5": lambda **x: transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(**{**COMMON, **HEAD, **DENSE, **GDN, **x})
    ),
    "qwen3_5_moe": lambda **x: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**{**COMMON, **HEAD, **GDN, **MOE, **x})
    ),
    "qwen3_5_multimodal": _multimodal,
    "lfm2": lambda **x: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **{
                **COMMON,
                **DENSE,
                "block_multiple_of": 32,
                "tie_word_embeddings": False,
                "layer_types": ["conv", "full_attention", "conv", "conv"],
                **x,
            }
        )
    ),
    "lfm2_moe": lambda **x: transformers.Lfm2MoeForCausalLM(
        transformers.Lfm2MoeConfig(
            **{
                **COMMON,
                **DENSE,
                **MOE,
                "num_dense_layers": 1,
                "routed_scaling_factor": 2.5,
                "tie_word_embeddings": False,
                "layer_types": ["conv", "full_attention", "conv", "conv"],
                **x,
            }
        )
    ),
    "lfm3": lambda **x: transformers.Lfm3ForCausalLM(
        transformers.Lfm3Config(
            **{
                **COMMON,
                **HEAD,
                **DENSE,
                "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
                "sliding_window": 70,
                "tie_word_embeddings": False,
                "pad_token_id": 0,
                "eos_token_id": 1,
                **x,
            }
        )
    ),
    "lara_mini": lambda **x: transformers.LaraMiniForCausalLM(
        transformers.LaraMiniConfig(
            **{
                **COMMON,
                **HEAD,
                **GDN,
                **MOE,
                "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
                "sliding_window": 70,
                "tie_word_embeddings": False,
                "eos_token_id": 1,
                **x,
            }
        )
    ),
    "granite_hybrid": lambda **x: transformers.GraniteMoeHybridForCausalLM(
        transformers.GraniteMoeHybridConfig(**{**GRANITE, "num_local_experts": 0, **x})
    ),
    "granite_moe": lambda **x: transformers.GraniteMoeHybridForCausalLM(
        transformers.GraniteMoeHybridConfig(**{**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, **x})
    ),
    "nemotron_h": lambda **x: transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **{
                **COMMON,
                **HEAD,
                **DENSE,
                "mamba_num_heads": 8,
                "mamba_head_dim": 12,
                "n_groups": 2,
                "ssm_state_size": 32,
                "chunk_size": 64,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 48,
                "routed_scaling_factor": 2.5,
                "time_step_min": 1e-30,  # its prefill holds steps above that, its decode does not
                **x,
            }
        )
    ),
    "falcon_h1": lambda **x: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            **{
                **COMMON,
                **HEAD,
                **DENSE,
                **MAMBA2,
                "mamba_d_ssm": 128,
                "num_hidden_layers": 2,
                "attention_in_multiplier": 0.8,
                "attention_out_multiplier": 0.7,
                "key_multiplier": 0.6,
                "embedding_multiplier": 1.2,
                "lm_head_multiplier": 0.5,
                "mlp_multipliers": [0.7, 1.3],
                "ssm_in_multiplier": 1.2,
                "ssm_out_multiplier": 0.6,
                "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
                **x,
            }
        )
    ),
    "bamba": lambda **x: transformers.BambaForCausalLM(
        transformers.BambaConfig(**{**COMMON, **DENSE, **MAMBA2, "attn_layer_indices": [1], **x})
    ),
    "zamba2": lambda **x: transformers.Zamba2ForCausalLM(
        transformers.Zamba2Config(
            **{
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 9,
                "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", *["mamba"] * 4],
                "num_attention_heads": 4,
                "num_mem_blocks": 2,
                "max_position_embeddings": 2048,
                "use_shared_attention_adapter": True,
                "adapter_rank": 8,
                "use_mem_rope": True,
                "n_mamba_heads": 8,
                "mamba_ngroups": 2,
                "mamba_d_state": 32,
                "time_step_min": 1e-30,  # its prefill holds steps above that, its decode does not
                **x,
            }
        )
    ),
    "mamba2": lambda **x: transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            **{
                "vocab_size": 256,
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_heads": 8,
                "head_dim": 16,
                "n_groups": 2,
                "state_size": 32,
                "chunk_size": 64,
                "residual_in_fp32": False,
                **x,
            }
        )
    ),
    "olmo_hybrid": lambda **x: transformers.OlmoHybridForCausalLM(
        transformers.OlmoHybridConfig(
            **{
                **COMMON,
                **DENSE,
                **GDN,
                "linear_key_head_dim": 24,
                "linear_value_head_dim": 48,
                "rope_parameters": None,
                "pad_token_id": 0,
                "eos_token_id": 1,
                **x,
            }
        )
    ),
    "jamba": lambda **x: transformers.JambaForCausalLM(
        transformers.JambaConfig(
            **{
                **COMMON,
                **DENSE,
                "num_experts": 4,
                "mamba_d_state": 12,
                "mamba_dt_rank": 6,
                "attn_layer_period": 3,
                "attn_layer_offset": 1,
                **x,
            }
        )
    ),
    "bailing_hybrid": lambda **x: transformers.BailingHybridForCausalLM(
        transformers.BailingHybridConfig(**{**KIMI, "head_dim": 16, **x})
    ),
    "alice_ai": lambda **x: AliceAIForCausalLM(AliceAIConfig(**{**COMMON, **HEAD, **MOE, **ALICE, **x})),
    "bailing_moe_v2_5": lambda **x: BailingMoeV2_5ForCausalLM(BailingMoeV2_5Config(**{**LIGHTNING, **x})),
    "kimi_linear": lambda **x: transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**{**KIMI, **x})),
    "glm5_next": _glm5_next,
    "qwen4_exp": lambda **x: transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**{**QWEN4, **x})),
    "mamba": lambda **x: transformers.MambaForCausalLM(transformers.MambaConfig(**{**MAMBA, **x})),
    "falcon_mamba": lambda **x: transformers.FalconMambaForCausalLM(
        transformers.FalconMambaConfig(**{**MAMBA, "mixer_rms_eps": 1e-3, "tie_word_embeddings": False, **x})
    ),
}
ATTENTION_ALONE = ("llama", "mistral", "qwen3")
HYBRID = tuple(name for name in FAMILIES if name not in ATTENTION_ALONE)


@torch.no_grad()
def make_state_sensitive(model: Any, seed: int) -> None:
    """Fill every weight so that recurrent states decay slowly and carry much of the logits."""
    generator = torch.Generator().manual_seed(seed)
    bounds = {"kda_lower_bound", "linear_lower_bound"}.intersection(vars(model.config.get_text_config()))
    rates = (0.5, 1) if bounds else (-4, -1)  # of bounded decays a steep sigmoid's
    strong: tuple[str, ...] = ("linear_attn", "mamba", "mixer", "forget_gate")
    if hasattr(model.config, "block_attn_res_block_size"):  # mixed residuals need no more, and grow rounding errors
        strong = ("f_b_proj",)
    for name, weight in model.named_parameters():
        if name.endswith(("A_log", "a_log_bias")):
            weight.uniform_(*rates, generator=generator)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.uniform_(-3, -1, generator=generator)
        elif weight.dim() == 1 and "norm" in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        elif name.endswith(".D"):
            weight.uniform_(0.5, 1.5, generator=generator)
        elif "embed" in name:
            weight.normal_(0, 1, generator=generator)
        elif "conv1d" in name:
            weight.normal_(0, 0.5, generator=generator)
        else:
            gain = 2.0 if any(mixer in name for mixer in strong) else 1.0
            weight.normal_(0, gain * weight.shape[-1] ** -0.5, generator=generator)
    for name, bias in model.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            bias.normal_(0, 1, generator=generator)


def write_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard_size: str = "", **config: Any
) -> Any:
    """Save a state-sensitive model of `family` and return transformers' own instance of it, in eval mode.

    `shard_size` such as "100KB" writes several shards and an index. Skips the test if transformers is too old.
    """
    torch.manual_seed(seed)
    try:
        model = FAMILIES[family](**config).eval()
    except AttributeError as error:
        pytest.skip(str(error))
    make_state_sensitive(model, seed)
    model.to(dtype)
    sharding = {"max_shard_size": shard_size} if shard_size else {}
    model.save_pretrained(folder, **sharding)
    return model

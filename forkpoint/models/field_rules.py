"""Rules for fields of a config.json that a family does not read: harmless, refused or unknown."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from forkpoint.errors import UnsupportedModelError

# Fields that do not change the logits: for training, caches, kernels, other parts of a multimodal model, or readers.
_HARMLESS: Final = """
_attn_implementation _name_or_path architectures attn_implementation auto_map chunk_size chunk_size_feed_forward
compression_config custom_pipelines dtype generation_config hf_quant_config id2label is_encoder_decoder label2id
language_model_only linear_a_log_max linear_a_log_min linear_dt_max linear_dt_min mamba_chunk_size
mamba_ssm_cache_dtype mamba_ssm_dtype model_max_length model_type moe_shared_expert_overlap num_logits_to_keep
output_attentions output_hidden_states output_router_logits pretraining_tp problem_type qk_head_dim
quantization_config rescale_prenorm_residual residual_in_fp32 return_dict rope_parameters rope_scaling
task_specific_params text_config time_step_max time_step_min time_step_scale torch_dtype torchscript
transformers.js_config transformers_version unsloth_fixed unsloth_version use_associative_scan use_cache
use_mamba_kernels use_mambapy use_mem_eff_path use_return_dict
"""
HARMLESS_KIND: Final = re.compile(
    r"(vision|visual|audio|image|video)_.*|.*_token_(id|index)s?|.*dropout.*|.*_loss_\w+"
    r"|initializer_\w+|.*_init_(floor|range|scale|scheme|std)|use_xavier_init|.*_use_xavier_init|time_step_(floor|init_\w+)"
    r"|mup_\w*lr\w*|mrope_\w+|mtp_\w+"
)
# Fields that change the logits of some architectures, grouped by the value that turns them off.
_OFF: Final = """
add_bias_linear add_qkv_bias alibi attention_bias attn_temperature_tuning clip_qkv conv_bias mlp_bias
mla_use_output_gate moe_bias parallel_attn proj_bias projectors_bias qk_layernorm qk_norm qkv_bias use_alibi
use_attention_sinks use_bias use_full_rank_gate use_gated_attention use_head_gate use_indexer use_kda_lora
use_long_context use_mup use_nope use_parallel_residual use_post_norm use_qk_l2norm use_qk_norm use_qkv_bias
use_sandwich_norm use_sliding_window
"""
_ZERO: Final = """
attention_chunk_size attn_logit_softcapping attn_res_block_size cope_dim final_logit_softcapping gate_lower_bound
hc_mult index_head_dim index_n_heads index_topk kv_shared_layers logit_softcap moe_latent_size ngram_vocab_size
no_rope_layers num_kv_heads_for_linear_attn num_kv_shared_layers num_residual_streams q_lora_rank
routed_expert_hidden_size sliding_window
"""
_ONE: Final = """
attention_multiplier embedding_multiplier logit_scale logits_scaling lm_head_multiplier moe_layer_freq
partial_rotary_factor residual_multiplier residual_scale router_scaling_factor scale_depth scale_emb
"""
_ON: Final = """
attn_output_gate block_use_swiglu is_causal mamba_use_mlp no_kda_lora rms_norm use_conv_bias use_pos_enc use_rope
"""
# Names of fields that let tokens attend to later ones, such as those of one image to each other. Chunks and prefixes
# would change the logits.
_BIDIRECTIONAL: Final = "bidirectional"
# Fields of rotary positions that apply only to some rope_type. They are checked where that type is read.
_ROTARY: Final = """
attention_factor beta_fast beta_slow factor finetuned high_freq_factor low_freq_factor mscale mscale_all_dim
original_max_position_embeddings rope_theta rope_type truncate type
"""
ROTARY: Final = frozenset(_ROTARY.split())
HARMLESS: Final = frozenset(_HARMLESS.split())
CHANGING: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(_ZERO.split(), (0, False)),
    **dict.fromkeys(_ONE.split(), (1,)),
    **dict.fromkeys(_ON.split(), (True,)),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "scoring_func": ("sigmoid",),
}


def unknown_fields(
    values: Mapping[str, Any], read: Collection[str], defaults: Mapping[str, Any], unneeded: Collection[str], where: str
) -> tuple[str, ...]:
    """Return the sorted names of unknown fields, which the caller should log.

    `read` are the names that the family has read. `unneeded` are names that it knows and need not read. `defaults` maps
    all fields of transformers' class to their default values. Raises UnsupportedModelError for a field that changes the
    forward pass, is not read, and has neither its default value nor one without effect.
    """
    unknown = []
    for name, value in values.items():
        without_effect = CHANGING.get(name, (False,) if _BIDIRECTIONAL in name else ())
        harmless = name in unneeded or name in HARMLESS or (HARMLESS_KIND.fullmatch(name) and not without_effect)
        if value is None or name in read or harmless or _is_default(value, defaults.get(name)):
            continue
        if any(value is same if isinstance(same, bool) else value == same for same in without_effect):
            continue
        if without_effect or name in defaults:
            usual = " or ".join(repr(same) for same in without_effect or (defaults.get(name),))
            raise UnsupportedModelError(
                f"{where} has {name}={value!r}; forkpoint runs this architecture with {name}={usual} alone"
            )
        unknown.append(name)
    return tuple(sorted(unknown))


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        default = list(default)
    return bool(default == value)

"""Nemotron-H and Nemotron-3: each layer is one part: Mamba-2, attention without positions, or an MLP."""

from __future__ import annotations

from typing import ClassVar

from forkpoint.errors import ModelFolderError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.config import ModelConfig, MTPNames, ParallelConfig, PartConfig
from forkpoint.models.decoder import BACKBONE, Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import MLPConfig
from forkpoint.models.mamba2 import Mamba2Config
from forkpoint.models.moe import MoEConfig
from forkpoint.models.mtp import draft_layer
from forkpoint.models.radio_vision import RadioVisionConfig
from forkpoint.models.vision import VisionConfig

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Fields of parts that only some of the models have.
_UNNEEDED = """
attention_head_dim expand mamba_expand moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group
n_routed_experts n_shared_experts norm_eps norm_topk_prob num_experts_per_tok partial_rotary_factor rope_theta
routed_scaling_factor topk_group
"""


def _mtp_names(num_parts: int) -> MTPNames:
    first, last = "mtp.layers.0", f"mtp.layers.{num_parts - 1}"
    return MTPNames(
        embedding_norm=f"{first}.enorm",
        hidden_norm=f"{first}.hnorm",
        join=f"{first}.eh_proj",
        norm=f"{last}.final_layernorm",
        blocks=tuple((f"mtp.layers.{part}.norm", f"mtp.layers.{part}") for part in range(num_parts)),
    )


class NemotronH(Model):
    architectures: ClassVar = ("NemotronHForCausalLM",)
    norms: ClassVar = ("norm",)
    field_names: ClassVar = {
        "n_routed_experts": "num_experts",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "layer_norm_epsilon": "rms_norm_eps",
        "mamba_hidden_act": "hidden_act",
        "mamba_dt_limit": "time_step_limit",
    }
    config_class: ClassVar = "nemotron_h.NemotronHConfig"
    unneeded_fields: ClassVar = _UNNEEDED.split()
    weight_names: ClassVar = BACKBONE

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        fields.require("mlp_hidden_act", "relu2")
        fields.refuse("mlp_bias", "attention_bias", "use_bias")
        parts: dict[str, PartConfig] = {
            "linear_attention": Mamba2Config.read(fields, name="mixer"),
            "full_attention": AttentionConfig.read(fields, qk_norm=None, name="mixer"),
            "mlp": MLPConfig(fields.integer("intermediate_size"), gated=False, name="mixer"),
        }
        parts |= {"mamba": parts["linear_attention"], "attention": parts["full_attention"]}
        kinds = cls.kinds(fields)
        if "moe" in kinds:
            parts["moe"] = cls.experts(fields)
        drafting = cls.draft_kinds(fields)
        if "moe" in drafting and "moe" not in parts:
            parts["moe"] = cls.experts(fields)
        draft_parts = [parts[kind] for kind in drafting]
        return ModelConfig.of(
            fields,
            [(parts[kind],) for kind in kinds],
            draft_layer=draft_layer(fields, *draft_parts) if drafting else (),
            mtp_names=_mtp_names(len(drafting)) if drafting else None,
        )

    @classmethod
    def read_vision(cls, fields: Fields, config: ModelConfig, settings: ImageSettings) -> VisionConfig:
        return RadioVisionConfig.read(fields, config, settings)

    @staticmethod
    def draft_kinds(fields: Fields) -> list[str]:
        """Return the kinds of the MTP head's parts.

        Empty if there is no head, or it does not begin with its only attention.
        """
        if not fields.integer("num_nextn_predict_layers", 0, low=0):
            return []
        given = fields.values.get("mtp_layers_block_type")
        if given is None:
            pattern = fields.values.get("mtp_hybrid_override_pattern") or "*E"
            given = [LETTERS.get(letter, letter) for letter in str(pattern)]
        kinds = ["full_attention" if kind == "attention" else kind for kind in given] if isinstance(given, list) else []
        if kinds[:1] != ["full_attention"] or not set(kinds[1:]) <= {"moe", "mlp"}:
            return []
        return kinds

    @classmethod
    def kinds(cls, fields: Fields) -> list[str]:
        """Return the kind of each layer, read from a list of names or a string of letters. Raises as Fields does."""
        given = fields.values.get("layer_types")
        if given is None:
            given = [
                LETTERS.get(letter, letter) for letter in str(fields.values.get("hybrid_override_pattern", "ME*-"))
            ]
        if not isinstance(given, list):
            raise ModelFolderError(f"{fields.where} has layer_types={given!r}; a list is needed")
        counted = fields.replaced({"layer_types": given, "num_hidden_layers": len(given)})
        # names that other writers of config.json use
        return counted.layer_types((*LETTERS.values(), "mamba", "attention"), lambda i: "mlp")

    @staticmethod
    def experts(fields: Fields) -> PartConfig:
        """Read routed experts, and a shared one for all tokens. Raises as Fields does.

        With a latent size the routed experts read a projection of x.
        """
        shared = fields.integer("moe_shared_expert_intermediate_size")
        latent = fields.integer("moe_latent_size", 0, low=0)
        if not latent:
            return MoEConfig.read_grouped(fields, gated=False, shared_intermediate_size=shared, name="mixer")
        routed = MoEConfig.read_grouped(fields, gated=False, latent_size=latent, name="")
        return ParallelConfig((routed, MLPConfig(shared, gated=False, name="shared_experts")), name="mixer")

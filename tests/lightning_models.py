"""Ling-2.6 in plain torch, from the formulas of its published modeling code. transformers has no class for it.

Weights have the published names, and the config class has the published defaults.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@strict
class BailingMoeV2_5Config(PreTrainedConfig):
    model_type = "bailing_hybrid"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = False
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    rope_theta: float = 600000.0
    max_window_layers: int = 20
    rope_parameters: dict[str, Any] | None = None
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = 156892
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    head_dim: int = 128
    use_qk_norm: bool = True
    num_nextn_predict_layers: int = 0
    mtp_loss_scaling_factor: float = 0.0
    moe_router_enable_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    layer_group_size: int = 5
    group_norm_size: int = 4
    linear_silu: bool = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    rope_interleave: bool = True
    partial_rotary_factor: float = 0.5
    score_function: str = "sigmoid"
    scoring_func: str = "sigmoid"
    seq_aux: bool = True
    topk_method: str = "noaux_tc"
    router_dtype: str = "fp32"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": self.rope_theta}
        super().__post_init__(**kwargs)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Norm(nn.Module):
    """An RMS norm over `groups` equal parts of the last dim."""

    def __init__(self, size: int, eps: float = 1e-6, groups: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = nn.Parameter(torch.ones(size)), eps, groups

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().unflatten(-1, (self.groups, -1))
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2).to(x.dtype)


class Gated(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: BailingMoeV2_5Config, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (linear(size, config.hidden_size) for _ in range(2))
        self.down_proj = linear(config.hidden_size, size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Router(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight of each expert, which is 0 for all but the chosen ones."""
        config = self.config
        shares = F.linear(x.float(), self.weight.float()).sigmoid()
        votes = (shares + self.expert_bias).unflatten(-1, (config.n_group, -1))
        best = votes.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        competing = torch.zeros_like(votes[..., 0]).scatter(-1, best, 1).bool()
        votes = votes.masked_fill(~competing[..., None], float("-inf")).flatten(-2)
        chosen = torch.zeros_like(shares).scatter(-1, votes.topk(config.num_experts_per_tok, -1).indices, 1) * shares
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList(Gated(config, size) for _ in range(config.num_experts))
        self.gate, self.shared_experts = Router(config), Gated(config, size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([expert(x) for expert in self.experts], -1)
        found: Tensor = (each * self.gate(x).unsqueeze(-2)).sum(-1).to(x.dtype) + self.shared_experts(x)
        return found


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first dims of `x[T, heads, D]`, whose halves are paired."""
    cos, sin = (part[:, None].to(x.dtype) for part in cos_sin)
    first, second, rest = torch.split(x, [half := cos.shape[-1], half, x.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class LatentAttention(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        self.config, hidden, heads = config, config.hidden_size, config.num_attention_heads
        dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_proj = linear(heads * dim, hidden)
        else:
            self.q_a_proj, self.q_a_layernorm = linear(config.q_lora_rank, hidden), Norm(config.q_lora_rank)
            self.q_b_proj = linear(heads * dim, config.q_lora_rank)
        self.kv_a_proj_with_mqa = linear(config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        self.kv_a_layernorm = Norm(config.kv_lora_rank)
        self.kv_b_proj = linear(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        self.dense = linear(hidden, heads * config.v_head_dim)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        config, heads = self.config, (self.config.num_attention_heads, -1)
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        k, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, heads)
            .split([config.qk_nope_head_dim, config.v_head_dim], -1)
        )
        q, q_shared = q.unflatten(-1, heads).split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        # neighbours are paired
        q_shared, shared = (
            rotated(each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos_sin)
            for each in (q_shared, shared[:, None])
        )
        q, k = torch.cat((q, q_shared), -1), torch.cat((k, shared.expand(-1, heads[0], -1)), -1)
        scores = torch.einsum("ihd,jhd->hij", q, k).float() * q.shape[-1] ** -0.5
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1).to(v.dtype)
        found: Tensor = self.dense(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
        return found


class LightningAttention(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config, layer: int) -> None:
        super().__init__()
        self.config, heads, dim, eps = config, config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.query_key_value, self.g_proj = (linear(n * heads * dim, config.hidden_size) for n in (3, 1))
        self.query_layernorm, self.key_layernorm = Norm(dim, eps), Norm(dim, eps)
        self.g_norm = Norm(heads * dim, eps, config.group_norm_size)
        self.dense = linear(config.hidden_size, heads * dim)
        depth = 1 - (layer - 1) / max(1, config.num_hidden_layers - 1) + 1e-5
        self.slopes = [slope * depth for slope in alibi(heads)]

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Weigh the values of all earlier tokens by `e^(-slope * distance) q.k / sqrt(D)`."""
        heads = (self.config.num_attention_heads, self.config.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in self.query_key_value(x).chunk(3, -1))
        q, k = rotated(self.query_layernorm(q), cos_sin), rotated(self.key_layernorm(k), cos_sin)
        at = torch.arange(len(x), dtype=torch.float32)
        distance = (at[:, None] - at).masked_fill(at[:, None] < at, float("inf"))
        decays = torch.exp(-distance * torch.tensor(self.slopes)[:, None, None])
        scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * decays * heads[1] ** -0.5
        out = torch.einsum("hij,jhd->ihd", scores, v.float()).to(x.dtype)
        found: Tensor = self.dense(self.g_norm(out.flatten(1)) * self.g_proj(x).sigmoid())
        return found


def alibi(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi(below) + alibi(2 * below)[0::2][: heads - below]


class Layer(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config, layer: int) -> None:
        super().__init__()
        every, count = config.layer_group_size, config.num_hidden_layers
        self.attends = (layer + 1) % every == 0 or layer >= count // every * every
        self.attention: nn.Module = LatentAttention(config) if self.attends else LightningAttention(config, layer)
        dense = layer < config.first_k_dense_replace
        self.mlp: nn.Module = Gated(config, config.intermediate_size) if dense else Experts(config)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), positions[self.attends])
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Decoder(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class BailingMoeV2_5ForCausalLM(PreTrainedModel):
    config_class = BailingMoeV2_5Config
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__(config)
        self.model, self.lm_head = Decoder(config), linear(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def cos_sin(self, length: int, dim: int) -> Tensor:
        """Return `[2, length, dim / 2]`. The parts of stretched contexts are transformers'."""
        longest, rope = self.config.max_position_embeddings, self.config.rope_parameters
        inverse, gain = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
        if rope["rope_type"] != "default":
            shape = LlamaConfig(max_position_embeddings=longest, head_dim=dim, rope_parameters=rope)
            inverse, gain = ROPE_INIT_FUNCTIONS[rope["rope_type"]](shape, torch.device("cpu"))
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        return torch.stack((angles.cos(), angles.sin())) * gain

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> CausalLMOutput:
        x = (self.model.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds)[0]
        config = self.config
        share = config.rope_parameters.get("partial_rotary_factor", config.partial_rotary_factor)
        linear_dim = int(config.head_dim * share)
        positions = tuple(self.cos_sin(len(x), dim) for dim in (linear_dim, config.qk_rope_head_dim))
        for layer in self.model.layers:
            x = layer(x, positions)
        hidden = self.model.norm(x)
        return CausalLMOutput(logits=self.lm_head(hidden)[None], hidden_states=(hidden[None],))

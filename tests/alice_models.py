"""AliceAI in plain torch, from the formulas of vLLM's implementation. transformers has no class for it.

Weights have the published names. Gated attention is transformers' own of Qwen3-Next.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3NextConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from tests.lightning_models import Norm, linear


@strict
class AliceAIConfig(Qwen3NextConfig):
    model_type = "alice_ai"

    vocab_size: int = 129024
    max_position_embeddings: int = 262144
    rope_theta: float = 1e6
    linear_num_key_heads: int = 32
    block_attn_res_block_size: int = 4
    router_score_function: str = "sigmoid"
    router_bias_correction: bool = True
    kda_allow_negative_eigenvalues: bool = False
    mtp_num_hidden_layers: int = 1
    number_of_conv_states: int = 3

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            share = kwargs.get("partial_rotary_factor", 0.25)
            rope = {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": share}
            self.rope_parameters = rope
        super().__post_init__(**kwargs)


class KDA(nn.Module):
    """The gated delta rule with a decay for each key, token by token."""

    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.linear_num_key_heads, config.linear_key_head_dim
        inner, hidden, width = self.heads * self.dim, config.hidden_size, config.linear_conv_kernel_dim
        for part in "qkv":
            setattr(self, f"{part}_proj", linear(inner, hidden))
            conv = nn.Conv1d(inner, inner, width, groups=inner, padding=width - 1, bias=False)
            setattr(self, f"{part}_conv1d", conv)
        self.b_proj = linear(self.heads, hidden)
        self.f_a_proj, self.f_b_proj = linear(self.dim, hidden), linear(inner, self.dim)
        self.g_a_proj, self.g_b_proj = linear(self.dim, hidden), linear(inner, self.dim)
        self.a_log_bias, self.dt_bias = (nn.Parameter(torch.zeros(size)) for size in (self.heads, inner))
        self.o_norm, self.o_proj = Norm(self.dim, config.rms_norm_eps), linear(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._convolved(x, part).unflatten(-1, (self.heads, self.dim)).float() for part in "qkv")
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        raw = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        decays = torch.exp(-self.a_log_bias.float().exp()[:, None] * F.softplus(raw.unflatten(-1, (self.heads, -1))))
        beta, state, out = self.b_proj(x).float().sigmoid(), torch.zeros(self.heads, self.dim, self.dim), []
        for t in range(len(x)):
            state = state * decays[t, :, None]  # [H, V, K]
            error = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + error[..., None] * k[t, :, None]
            out.append(torch.einsum("hvk,hk->hv", state, q[t] * self.dim**-0.5))
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (self.heads, -1)).sigmoid()
        found: Tensor = self.o_proj((self.o_norm(torch.stack(out).to(x.dtype)) * gate).flatten(1))
        return found

    def _convolved(self, x: Tensor, part: str) -> Tensor:
        inputs = getattr(self, f"{part}_proj")(x).T[None]
        found: Tensor = F.silu(getattr(self, f"{part}_conv1d")(inputs)[0, :, : len(x)]).T
        return found


class Gated(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(size, hidden), linear(size, hidden), linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Router(nn.Module):
    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__()
        self.top_k, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight of each expert, which is 0 for all but the chosen ones."""
        shares = F.linear(x.float(), self.weight.float()).sigmoid()
        votes = shares + self.e_score_correction_bias
        chosen = torch.zeros_like(shares).scatter(-1, votes.topk(self.top_k, -1).indices, 1) * shares
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if self.normalise else chosen


class Stacks(nn.Module):
    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__()
        count, size, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))


class Experts(nn.Module):
    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Stacks(config)
        self.shared_expert = Gated(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(1, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->tei", x, self.experts.gate_up_proj).chunk(2, -1)
        each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.experts.down_proj)
        routed = (each * self.gate(x).unsqueeze(-1)).sum(1).to(x.dtype)
        found: Tensor = routed + self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return found


def mixed(residuals: list[Tensor], norm: Tensor, query: nn.Linear, eps: float) -> Tensor:
    stack = torch.stack(residuals).float()
    scores = (stack * (stack.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.float()) @ query.weight[0].float()
    return (scores.softmax(0)[..., None] * stack).sum(0).to(residuals[0].dtype)


class Layer(nn.Module):
    def __init__(self, config: AliceAIConfig, layer: int) -> None:
        super().__init__()
        self.eps, self.begins, hidden = (
            config.rms_norm_eps,
            layer % config.block_attn_res_block_size == 0,
            config.hidden_size,
        )
        self.linear = config.layer_types[layer] == "linear_attention"
        if self.linear:
            self.linear_attn = KDA(config)
        else:
            self.self_attn = Qwen3NextAttention(config, layer)
        self.mlp = Experts(config)
        self.input_layernorm, self.post_attention_layernorm = (Qwen3NextRMSNorm(hidden, self.eps) for _ in range(2))
        if layer:
            self.attn_res_proj, self.attn_res_norm_weight = linear(1, hidden), nn.Parameter(torch.ones(hidden))
        self.mlp_res_proj, self.mlp_res_norm_weight = linear(1, hidden), nn.Parameter(torch.ones(hidden))

    def forward(self, done: list[Tensor], x: Tensor | None, positions: Any) -> Tensor:
        """Return the block's sum; `x` is the one before, or None if the block begins."""
        own = done[0]
        if hasattr(self, "attn_res_proj"):
            own = mixed(
                [*done, *([x] if x is not None else [])], self.attn_res_norm_weight, self.attn_res_proj, self.eps
            )
        own = self.input_layernorm(own)
        if self.linear:
            out = self.linear_attn(own)
        else:
            ahead = torch.full((len(own), len(own)), torch.finfo(own.dtype).min, dtype=own.dtype).triu(1)
            out = self.self_attn(own[None], positions, ahead[None, None])[0][0]
        x = out if x is None else x + out
        own = mixed([*done, x], self.mlp_res_norm_weight, self.mlp_res_proj, self.eps)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(own))
        return found


class LastMixer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.res_proj, self.res_norm_weight = linear(1, hidden), nn.Parameter(torch.ones(hidden))


class Decoder(nn.Module):
    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.attnres_final = LastMixer(config.hidden_size)
        self.norm = Qwen3NextRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3NextRotaryEmbedding(config)


class AliceAIForCausalLM(PreTrainedModel):
    config_class = AliceAIConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: AliceAIConfig) -> None:
        super().__init__(config)
        self.model, self.lm_head = Decoder(config), linear(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        model = self.model
        x: Tensor | None = model.embed_tokens(input_ids[0])
        positions, done = model.rotary_emb(x[None], torch.arange(input_ids.shape[1])[None]), list[Tensor]()
        for layer in model.layers:
            if layer.begins:
                done, x = [*done, x], None
            x = layer(done, x, positions)
        last = model.attnres_final
        hidden = model.norm(mixed([*done, x], last.res_norm_weight, last.res_proj, self.config.rms_norm_eps))
        return CausalLMOutput(logits=self.lm_head(hidden)[None])

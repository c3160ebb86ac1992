"""Qwen3-Next for training: transformers' parameter names, whole rows at once, no cache.

Activations are in `compute_dtype`. Parameters are in fp32 and cast when they are used. Tokens are flat, `N = B * T`, in
all code that works on one token (or, in the convolution, on a few before it). Such code has the same shapes for every
row length, so it is compiled once. Only attention and the delta rule work on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.delta_rule import DeltaRule, l2_normalised
from train.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Rows:
    """The division of `[N, ...]` into rows, and each token's place in its row."""

    num_rows: int
    length: int
    positions: Tensor  # [N] int64
    cos: Tensor  # [N, R] fp32, R rotated dims of a head
    sin: Tensor  # [N, R]

    def split(self, x: Tensor, head_dim: int) -> Tensor:
        """Return `[N, H * D]` as `[B, T, H, D]`."""
        return x.view(self.num_rows, self.length, -1, head_dim)


def make_rows(shape: ModelShape, num_rows: int, length: int, device: torch.device, first: int = 0) -> Rows:
    """Return rows that all start at position `first`."""
    exponents = torch.arange(0, shape.rotary_dim, 2, device=device, dtype=torch.float32) / shape.rotary_dim
    places = torch.arange(first, first + length, device=device)
    angles = places.float()[:, None] * shape.rope_theta**-exponents
    angles = torch.cat([angles, angles], dim=-1).repeat(num_rows, 1)
    positions = places.repeat(num_rows)
    return Rows(num_rows, length, positions, angles.cos(), angles.sin())


class Linear(nn.Module):
    def __init__(self, num_in: int, num_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * gain * num_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """An RMS norm whose weights are stored minus 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight * F.silu(gate.float())).to(x.dtype)


class ShortConvolution(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * width**-0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Convolve depthwise and causally within each row, then apply SiLU: `[N, C] -> [N, C]`."""
        width = self.weight.shape[-1]
        wide = x.float()
        out = wide * self.weight[:, 0, -1]
        for back in range(1, width):
            earlier = F.pad(wide, (0, 0, back, 0))[: x.shape[0]]
            out = out + torch.where(positions[:, None] >= back, earlier, 0.0) * self.weight[:, 0, width - 1 - back]
        return F.silu(out).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DeltaNet(nn.Module):
    """The parameters of a gated delta net, initialised to remember from a few to a few thousand tokens."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        keys, values, heads = shape.keys_size, shape.values_size, shape.num_v_heads
        self.in_proj_qkvz = Linear(shape.hidden_size, 2 * keys + 2 * values)
        self.in_proj_ba = Linear(shape.hidden_size, 2 * heads)
        self.conv1d = ShortConvolution(2 * keys + values, shape.conv_width)
        step = torch.empty(heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives `step`
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.5, 8.0).log())
        self.norm = GatedRMSNorm(shape.value_dim, shape.norm_eps)
        self.out_proj = Linear(values, shape.hidden_size, gain=0.3)


class DeltaNetLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.linear_attn = DeltaNet(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def before(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Map `[N, hidden]` to q, k, v, z `[N, heads * dim]`, and log decay and write strength `[N, HV]` fp32.

        The projections are stored key head by key head: q, k, then v and z of its value heads. b and a are stored
        likewise.
        """
        shape, net = self.shape, self.linear_attn
        x = self.input_layernorm(x)
        values = shape.values_size // shape.num_k_heads
        parts = _heads(net.in_proj_qkvz(x), shape.num_k_heads)
        q, k, v, z = (p.flatten(1) for p in torch.split(parts, [shape.key_dim, shape.key_dim, values, values], dim=-1))
        b, a = (p.flatten(1) for p in _heads(net.in_proj_ba(x), shape.num_k_heads).chunk(2, dim=-1))
        mixed = net.conv1d(torch.cat([q, k, v], dim=-1), positions)
        q, k, v = torch.split(mixed, [shape.keys_size, shape.keys_size, shape.values_size], dim=-1)
        q, k = (l2_normalised(_heads(y, shape.num_k_heads)).to(y.dtype).flatten(1) for y in (q, k))
        decay = -net.A_log.exp() * F.softplus(a.float() + net.dt_bias)
        return q, k, v.contiguous(), z, decay, b.float().sigmoid()

    def after(self, x: Tensor, mixed: Tensor, z: Tensor) -> Tensor:
        """Add the state's output, `[N, HV * V]`, and the MLP to the residual stream `x`."""
        heads = self.shape.num_v_heads
        mixed = self.linear_attn.norm(_heads(mixed, heads), _heads(z, heads)).flatten(1)
        x = x + self.linear_attn.out_proj(mixed.to(x.dtype))
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)))


class Attention(nn.Module):
    """The parameters of gated attention. `q_proj` has each head's query, then its gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.num_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, 2 * width)
        self.k_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(width, shape.hidden_size, gain=0.3)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)


class AttentionLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Map `[N, hidden]` to q, k, v, gate `[N, heads * dim]`, with keys and values repeated for each query head."""
        shape, attention = self.shape, self.self_attn
        x = self.input_layernorm(x)
        group = shape.num_heads // shape.num_kv_heads
        q, gate = _heads(attention.q_proj(x), shape.num_heads).chunk(2, dim=-1)
        q = _rotated(attention.q_norm(q), cos, sin)
        k = _rotated(attention.k_norm(_heads(attention.k_proj(x), shape.num_kv_heads)), cos, sin)
        v = _heads(attention.v_proj(x), shape.num_kv_heads)
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        return q.flatten(1), k.flatten(1), v.flatten(1), gate.flatten(1)

    def after(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(mixed * gate.sigmoid())
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)))


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Return `[N, H * D]` as `[N, H, D]`."""
    return torch.unflatten(x, -1, (num_heads, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of each head, with the two halves paired: `[N, H, D]`."""
    turned, rest = torch.split(x, [cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    turned = turned.float() * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _attend_to_steps(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attend with `[B, H, T, D]` each: query t sees the first keys up to t, and of all other keys the one at t."""
    length, scale = q.shape[2], q.shape[3] ** -0.5
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].mT).float().masked_fill(ahead, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1).to(q.dtype)
    mixed: Tensor = weights[..., :length] @ values[0]
    for i, v in enumerate(values[1:], length):
        mixed = mixed + weights[..., i : i + 1] * v
    return mixed


class Backbone(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden_size**-0.5)
        self.layers = nn.ModuleList(
            DeltaNetLayer(shape) if kind == "linear_attention" else AttentionLayer(shape) for kind in shape.layer_types
        )
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class MTPHead(nn.Module):
    """One attention layer that drafts the token after the next."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([AttentionLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        both = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        out: Tensor = self.fc(torch.cat(both, dim=-1))
        return out


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The computations of layers before and after the kernel that works along rows."""

    delta_before: Callable[[DeltaNetLayer, Tensor, Tensor], tuple[Tensor, ...]]
    delta_after: Callable[[DeltaNetLayer, Tensor, Tensor, Tensor], Tensor]
    attention_before: Callable[[AttentionLayer, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    attention_after: Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]


class HybridModel(nn.Module):
    """The model and its MTP head. The embedding is the output layer of both."""

    def __init__(self, shape: ModelShape, delta_rule: DeltaRule, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.mtp = MTPHead(shape)
        self._delta_rule = delta_rule
        self._compute_dtype = compute_dtype
        self._pieces = _Pieces(DeltaNetLayer.before, DeltaNetLayer.after, AttentionLayer.before, AttentionLayer.after)

    def fuse(self) -> None:
        """Compile the computations between the kernels. Layers of a kind share the compiled code."""
        pieces = self._pieces
        self._pieces = _Pieces(
            torch.compile(pieces.delta_before, dynamic=False),
            torch.compile(pieces.delta_after, dynamic=False),
            torch.compile(pieces.attention_before, dynamic=False),
            torch.compile(pieces.attention_after, dynamic=False),
        )

    def forward(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Map tokens `[N]` to the normalised input of the output layer, `[N, hidden]` in the compute dtype."""
        x = self.embedding(tokens)
        for layer in self.model.layers:
            x = self._layer(layer, x, rows)
        out: Tensor = self.model.norm(x)
        return out

    def draft(self, hidden: Tensor, next_tokens: Tensor, rows: Rows) -> Tensor:
        """Compute the input of the output layer for token t + 2, `[N, hidden]`, from `forward`'s output at t and token
        t + 1."""
        x = self.mtp.join(self.embedding(next_tokens), hidden)
        out: Tensor = self.mtp.norm(self._layer(self.mtp.layers[0], x, rows))
        return out

    def drafts(self, hidden: Tensor, following: Sequence[Tensor], rows: Rows) -> list[Tensor]:
        """Compute what `draft` does for several steps.

        Step j reads the tokens at t + 1 + j, `following[j]`, and the output of the step before. Its output is the input
        of the output layer for t + 2 + j. Like a decode step, a step sees the first step's keys of the tokens up to t +
        1, and the keys of the steps after that.
        """
        layer, shape = self.mtp.layers[0], self.shape
        assert isinstance(layer, AttentionLayer)
        keys, values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
        for j, tokens in enumerate(following):
            place = make_rows(shape, rows.num_rows, rows.length, tokens.device, first=j)
            x = self.mtp.join(self.embedding(tokens), hidden)
            q, k, v, gate = self._pieces.attention_before(layer, x, place.cos, place.sin)
            q, k, v = (rows.split(y, shape.head_dim).transpose(1, 2) for y in (q, k, v))
            keys.append(k)
            values.append(v)
            mixed = _attend_to_steps(q, keys, values).transpose(1, 2).reshape(x.shape[0], -1)
            hidden = self.mtp.norm(self._pieces.attention_after(layer, x, mixed, gate))
            outputs.append(hidden)
        return outputs

    def embedding(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.model.embed_tokens.weight.to(self._compute_dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: `[N, hidden] -> [N, vocabulary]`."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def _layer(self, layer: nn.Module, x: Tensor, rows: Rows) -> Tensor:
        if isinstance(layer, DeltaNetLayer):
            return self._remember(layer, x, rows)
        assert isinstance(layer, AttentionLayer)
        return self._attend(layer, x, rows)

    def _remember(self, layer: DeltaNetLayer, x: Tensor, rows: Rows) -> Tensor:
        shape = self.shape
        q, k, v, z, decay, strength = self._pieces.delta_before(layer, x, rows.positions)
        q, k, v = rows.split(q, shape.key_dim), rows.split(k, shape.key_dim), rows.split(v, shape.value_dim)
        gates = (y.view(rows.num_rows, rows.length, -1) for y in (decay, strength))
        mixed = self._delta_rule(q, k, v, *gates)
        return self._pieces.delta_after(layer, x, mixed.reshape(x.shape[0], -1), z)

    def _attend(self, layer: AttentionLayer, x: Tensor, rows: Rows) -> Tensor:
        q, k, v, gate = self._pieces.attention_before(layer, x, rows.cos, rows.sin)
        q, k, v = (rows.split(y, self.shape.head_dim).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._pieces.attention_after(layer, x, mixed.transpose(1, 2).reshape(x.shape[0], -1), gate)

"""The MTP head of a model: one more layer, which predicts the token after the next."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forkpoint.models.attention import Attention, AttentionConfig
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import Convolution, ShortConvConfig
from forkpoint.models.fields import Fields
from forkpoint.models.latent_attention import LatentAttention, LatentAttentionConfig
from forkpoint.models.layers import RMSNorm, join_projections, read_projection

FIRST_KEY = 1  # entry 0 has no hidden state before it


def draft_layer(fields: Fields, *parts: PartConfig) -> tuple[PartConfig, ...]:
    """Return the MTP head's parts: the previous hidden state, then `parts`, of which the first is attention.

    Empty if config.json has no MTP head, or several.
    """
    count = fields.integer("num_nextn_predict_layers", 1, low=0)
    if fields.integer("mtp_num_hidden_layers", count, low=0) != 1:
        return ()
    return ShortConvConfig(channels=fields.integer("hidden_size"), width=2), *parts


class MTPHead:
    """The function `fc([norm(embedding), norm(hidden)])`, a layer and a norm, of a token and the state before it.

    Entry `i` of its keys and values belongs to token `i` and the hidden state of token `i - 1`. A block therefore
    depends only on its own and earlier tokens. The head was trained with rotary position `i - 1`. Here all positions
    are one higher, which leaves distances unchanged. Entry 0 is never read. The hidden state of the newest token is
    stored as a convolution window of one token. Like the keys and values, it belongs to layer `len(config.layers)`.
    """

    def __init__(self, build: Build) -> None:
        build = replace(build, defers=True)
        self._layer, hidden, names = len(build.config.layers), build.config.hidden_size, build.config.mtp_names
        _, attention, *others = build.config.draft_layer
        assert names is not None and len(names.blocks) == 1 + len(others), "each part has a name"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build, name, hidden, centred=names.centred)

        self._norms = norm(names.embedding_norm), norm(names.hidden_norm)
        self._join = read_projection(build, names.join, hidden, 2 * hidden)
        (norm_name, prefix), *rest = names.blocks
        self._before_attention = norm(norm_name)
        self._attention = _keeping(build, f"{prefix}.{attention.name}", self._layer, attention)
        self._others = [
            (norm(norm_name), part.build(build, f"{prefix}.{part.name}", self._layer))
            for part, (norm_name, prefix) in zip(others, rest, strict=True)
        ]
        self._norm = norm(names.norm)
        taps = torch.tensor([1.0, 0.0], dtype=build.weights.dtype).repeat(hidden, 1)
        self._previous = Convolution(build.ops, self._layer, taps.to(build.weights.device), None, silu=False)

    def keep(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> None:
        """Store the keys and values of a step's tokens, and the hidden state of each row's last token.

        `embedded` and `hidden`, the model's output, are `[T, H]`.
        """
        x = self._before_attention(self._joined(embedded, self._previous(hidden, ctx)))
        self._attention.keep(x, ctx)

    def draft(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Run the whole layer on the newest token of each row and the hidden state before it, both `[B, H]`.

        Returns hidden states `[B, H]` that the output head reads like the model's own, and stores the tokens' keys. All
        rows decode. Keys of earlier tokens and drafts are those already stored.
        """
        x, residual = self._before_attention.add(self._joined(embedded, hidden), None)
        x = self._attention(x, ctx)
        for norm, block in self._others:
            x, residual = norm.add(x, residual)
            x = block(x, ctx)
        return self._norm.add(x, residual)[0]

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        of_embedding, of_hidden = self._norms
        return self._join(torch.cat([of_embedding(embedded), of_hidden(hidden)], dim=-1))


def _keeping(build: Build, name: str, layer: int, config: PartConfig) -> KeepingAttention | LatentAttention:
    if isinstance(config, LatentAttentionConfig):
        return LatentAttention(build, name, layer, config)
    assert isinstance(config, AttentionConfig), "the first part of an MTP head is attention"
    return KeepingAttention(build, name, layer, config)


class KeepingAttention(Attention):
    """Attention that can also store keys and values without attending."""

    def __init__(self, build: Build, name: str, layer: int, config: AttentionConfig) -> None:
        super().__init__(build, name, layer, config)
        rows = {part: config.rows[part] for part in "kv"}
        self._kv = join_projections(build, name, rows, build.config.hidden_size, config.bias)

    def keep(self, x: Tensor, ctx: ForwardContext) -> None:
        """Store the keys and values of `x[T, H]`."""
        k, v = self._kv(x).chunk(2, dim=-1)
        self.write(torch.empty_like(k), k, v, ctx)  # the operator needs queries, whose values do not matter here

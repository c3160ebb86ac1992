"""The MTP head of a model: one more layer, which predicts the token after the next.

Entry `i` of its keys and values belongs to token `i` and the hidden state of token `i - 1`. A block therefore depends
only on its own and earlier tokens. The head was trained with rotary position `i - 1`. Here all positions are one
higher, which leaves distances unchanged. Entry 0 is never read. The hidden state of the newest token is stored as a
convolution window of one token. Like the keys and values, it belongs to layer `len(config.layers)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.models.attention import Attention, AttentionConfig
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import CONV, Convolution, ShortConvConfig
from forkpoint.models.fields import Fields
from forkpoint.models.indexed_latent_attention import RecentLatentAttention, RecentLatentConfig
from forkpoint.models.latent_attention import LatentAttention, LatentAttentionConfig
from forkpoint.models.layers import RMSNorm, join_projections, read_projection

FIRST_KEY = 1  # entry 0 has no hidden state before it


def draft_layer(fields: Fields, *parts: PartConfig, num_streams: int = 1) -> tuple[PartConfig, ...]:
    """Return the MTP head's parts: the previous hidden state, then `parts`, of which the first is attention.

    The hidden state has `num_streams` streams. Empty if config.json has no MTP head, or several.
    """
    count = fields.integer("num_nextn_predict_layers", 1, low=0)
    if fields.integer("mtp_num_hidden_layers", count, low=0) != 1:
        return ()
    return ShortConvConfig(channels=num_streams * fields.integer("hidden_size"), width=2), *parts


class DraftHead(ABC):
    """A layer that computes a hidden state from a token's embedding and the hidden state before the token.

    `reads_streams`: the hidden states before and between tokens are the last layer's streams, side by side, `[T, N *
    H]`. Otherwise they are the model's output, `[T, H]`.
    """

    reads_streams: ClassVar[bool] = False

    @abstractmethod
    def keep(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> None:
        """Store the keys and values of a step's tokens, and the hidden state of each row's last token.

        `embedded` is `[T, H]`; `hidden` has the hidden states of the same tokens.
        """

    @abstractmethod
    def draft(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the whole layer on the newest token of each row, `embedded[B, H]`, and the hidden state before it.

        Returns hidden states `[B, H]` that the output head reads like the model's own, and the `hidden` of the next
        draft. Stores the tokens' keys. All rows decode. Keys of earlier tokens and drafts are those already stored.
        """


class MTPHead(DraftHead):
    """The function `fc([norm(embedding), norm(hidden)])`, a layer and a norm."""

    def __init__(self, build: Build) -> None:
        build = replace(build, defers=True)
        layer, hidden, names = len(build.config.layers), build.config.hidden_size, build.config.mtp_names
        _, attention, *others = build.config.draft_layer
        assert names is not None and len(names.blocks) == 1 + len(others), "each part has a name"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build, name, hidden, centred=names.centred)

        self._norms = norm(names.embedding_norm), norm(names.hidden_norm)
        self._join = read_projection(build, names.join, hidden, 2 * hidden)
        (norm_name, prefix), *rest = names.blocks
        self._before_attention = norm(norm_name)
        self._attention = keeping_attention(build, f"{prefix}.{attention.name}")
        self._others = [
            (norm(norm_name), part.build(build, f"{prefix}.{part.name}", layer))
            for part, (norm_name, prefix) in zip(others, rest, strict=True)
        ]
        self._norm = norm(names.norm)
        self._previous = previous_hidden(build)

    def keep(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> None:
        x = self._before_attention(self._joined(embedded, self._previous(hidden, ctx)))
        self._attention.keep(x, ctx)

    def draft(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x, residual = self._before_attention.add(self._joined(embedded, hidden), None)
        x = self._attention(x, ctx)
        for norm, block in self._others:
            x, residual = norm.add(x, residual)
            x = block(x, ctx)
        x = self._norm.add(x, residual)[0]
        return x, x

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        of_embedding, of_hidden = self._norms
        return self._join(torch.cat([of_embedding(embedded), of_hidden(hidden)], dim=-1))


def previous_hidden(build: Build) -> Convolution:
    """Return a function that maps each token's hidden state to that of the token before it, and stores the last one."""
    kept, *_ = build.config.draft_layer
    assert isinstance(kept, ShortConvConfig), "an MTP head keeps the hidden state of the newest token first"
    taps = torch.tensor([1.0, 0.0], dtype=build.weights.dtype).repeat(kept.channels, 1)
    state = build.state(len(build.config.layers), CONV)
    return Convolution(state, taps.to(build.weights.device), None, silu=False)


def keeping_attention(build: Build, name: str) -> KeepingAttention | LatentAttention | RecentLatentAttention:
    """Read the attention of the MTP head, whose names of weights start with `name`."""
    layer, config = len(build.config.layers), build.config.draft_layer[1]
    if isinstance(config, LatentAttentionConfig | RecentLatentConfig):
        return config.build(build, name, layer)
    assert isinstance(config, AttentionConfig), "the second part of an MTP head is attention"
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

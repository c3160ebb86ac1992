"""The MTP head of Qwen3.8-Flash-Next, whose hidden state is several streams."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forkpoint.models.config import Build
from forkpoint.models.context import ForwardContext
from forkpoint.models.gated_streams import gated_mixer, read_join
from forkpoint.models.layers import RMSNorm, read_projection
from forkpoint.models.mtp import DraftHead, keeping_attention, previous_hidden
from forkpoint.models.streams import StreamLayer


class StreamMTPHead(DraftHead):
    """The streams `fc_embedding(norm(embedding)) + fc_hidden(norm(hidden))`, a layer, and a gated mean.

    `hidden` are the streams of the last layer, or of the head itself for later drafts. One norm is over all of them
    together, and each is multiplied by the same matrix (SGLang 0.5.23 and vLLM 0.33).
    """

    reads_streams: ClassVar = True

    def __init__(self, build: Build) -> None:
        config, names = build.config, build.config.mtp_names
        assert names is not None and config.streams is not None, "the family's own"
        hidden, self._count = config.hidden_size, config.streams.count
        self._embedding_norm = RMSNorm(build, names.embedding_norm, hidden, centred=True)
        self._hidden_norm = RMSNorm(build, names.hidden_norm, self._count * hidden, centred=True)
        self._from_embedding = read_projection(build, "mtp.fc_embedding", hidden, hidden)
        self._from_hidden = read_projection(build, names.join, hidden, hidden)
        (first, prefix), (second, _) = names.blocks
        _, attention, mlp = config.draft_layer
        self._attention = keeping_attention(build, f"{prefix}.{attention.name}")
        self._attention_mixer = gated_mixer(build, first)
        block = mlp.build(build, f"{prefix}.{mlp.name}", len(config.layers))
        self._layer = StreamLayer([(self._attention_mixer, self._attention), (gated_mixer(build, second), block)])
        self._end = read_join(build, names.norm)
        self._previous = previous_hidden(build)

    def keep(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> None:
        x, _ = self._attention_mixer(self._joined(embedded, self._previous(hidden, ctx)))
        self._attention.keep(x, ctx)

    def draft(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        streams, _ = self._layer(self._joined(embedded, hidden), None, ctx)
        return self._end(streams)[0], streams.flatten(1)

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return streams `[T, N, H]`."""
        streams = torch.unflatten(self._hidden_norm(hidden), 1, (self._count, -1))
        own = self._from_hidden(streams.flatten(0, 1)).view(streams.shape)
        return self._from_embedding(self._embedding_norm(embedded)).unsqueeze(1) + own

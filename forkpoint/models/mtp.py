"""The MTP head of Qwen's models: one more layer, which predicts the token after the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forkpoint.models.attention import Attention, AttentionConfig
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import Convolution, ShortConvConfig
from forkpoint.models.fields import Fields
from forkpoint.models.layers import RMSNorm, join_projections, read_projection

FIRST_KEY = 1  # entry 0 has no hidden state before it


def draft_layer(
    fields: Fields, attention: AttentionConfig, mlp: Callable[[Fields, int], PartConfig]
) -> tuple[PartConfig, ...]:
    """Read the MTP head's parts: the previous hidden state, attention, and the MLP that the next layer would have.

    Empty if config.json has no MTP layer, or several.
    """
    others = fields.integer("num_nextn_predict_layers", 1, low=0)
    if fields.integer("mtp_num_hidden_layers", others, low=0) != 1:
        return ()
    hidden = ShortConvConfig(channels=fields.integer("hidden_size"), width=2)
    return hidden, attention, mlp(fields, fields.integer("num_hidden_layers") - 1)


class MTPHead:
    """Compute `fc([norm(embedding), norm(hidden)])`, a layer and a norm, from a token and the hidden state before it.

    Entry `i` of its keys and values belongs to token `i` and the hidden state of token `i - 1`. A block therefore
    depends only on its own and earlier tokens. The head was trained with rotary position `i - 1`. Here all positions
    are one higher, which leaves distances unchanged. Entry 0 is never read. The hidden state of the newest token is
    stored as a convolution window of one token. Like the keys and values, it belongs to layer `len(config.layers)`.
    """

    def __init__(self, build: Build) -> None:
        build = replace(build, defers=True)
        self._layer, hidden = len(build.config.layers), build.config.hidden_size
        _, attention, mlp = build.config.draft_layer
        assert isinstance(attention, AttentionConfig)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build, f"mtp.{name}", hidden, centred=True)

        self._norms = norm("pre_fc_norm_embedding"), norm("pre_fc_norm_hidden")
        self._join = read_projection(build, "mtp.fc", hidden, 2 * hidden)
        self._before_attention, self._before_mlp = (
            norm(f"layers.0.{name}") for name in ("input_layernorm", "post_attention_layernorm")
        )
        self._attention = KeepingAttention(build, f"mtp.layers.0.{attention.name}", self._layer, attention)
        self._mlp = mlp.build(build, f"mtp.layers.0.{mlp.name}", self._layer)
        self._norm = norm("norm")
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

        Returns a hidden state that the output head reads like the model's own. All rows decode. Keys of earlier tokens
        and drafts are those already stored.
        """
        x, residual = self._before_attention.add(self._joined(embedded, hidden), None)
        x, residual = self._before_mlp.add(self._attention(x, ctx), residual)
        return self._norm.add(self._mlp(x, ctx), residual)[0]

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        of_embedding, of_hidden = self._norms
        return self._join(torch.cat([of_embedding(embedded), of_hidden(hidden)], dim=-1))


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

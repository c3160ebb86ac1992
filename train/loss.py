"""The loss: the model's next tokens, and the MTP head's tokens after them, weighted by who says them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from train.data import Kind
from train.model import HybridModel, Rows

WEIGHTS = {Kind.PADDING: 0.0, Kind.GIVEN: 0.05, Kind.SAID: 0.3, Kind.SCORED: 1.0}
MTP_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss. `total` is minimised.

    `by_kind [kinds, 4]` fp32 has the sum of cross entropies and the number of tokens, for the model and then for the
    MTP head.
    """

    total: Tensor
    by_kind: Tensor


def cross_entropy(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropies `[N]` fp32 for `hidden[N, H]`, the output layer `embedding[V, H]` and `targets[N]`."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="none")


def ahead(x: Tensor, rows: Rows, count: int) -> Tensor:
    """Return the elements `count` places further in the same row; 0 beyond its end."""
    moved = F.pad(x, (0, count))[count:]
    return torch.where(rows.positions < rows.length - count, moved, 0)


class LossFunction:
    def __init__(self, model: HybridModel, compiled: bool) -> None:
        device = model.model.embed_tokens.weight.device
        self._model = model
        self._weights = torch.tensor([WEIGHTS[kind] for kind in Kind], device=device)
        self._entropy = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy

    def __call__(self, tokens: Tensor, kinds: Tensor, rows: Rows) -> Loss:
        """Return the loss of `tokens` and `kinds`, both `[N]` int64."""
        model, embedding = self._model, self._model.model.embed_tokens.weight
        next_tokens = ahead(tokens, rows, 1)
        hidden = model(tokens, rows)
        own = self._entropy(hidden, embedding, next_tokens)
        drafted = self._entropy(model.draft(hidden, next_tokens, rows), embedding, ahead(tokens, rows, 2))
        total, sums = self._weighted(own, ahead(kinds, rows, 1))
        draft_total, draft_sums = self._weighted(drafted, ahead(kinds, rows, 2))
        return Loss(total + MTP_WEIGHT * draft_total, torch.cat([sums, draft_sums], dim=1))

    def _weighted(self, entropies: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted mean, and `[kinds, 2]`: sums and counts."""
        weights = self._weights[kinds]
        columns = torch.stack([entropies.detach(), torch.ones_like(entropies)], dim=1)
        sums = F.one_hot(kinds, len(Kind)).float().T @ columns
        return (entropies * weights).sum() / weights.sum().clamp(min=1e-6), sums

"""Sampling parameters of a batch as columns, one element per row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One element per row of the logits.

    The filters apply in this order: keep the logits within `reach` of the largest (min_p); of these keep the `top_k`
    largest; of these keep the largest that together reach the share `top_p` of their probability. Equal logits are kept
    or dropped together: all that equal the k-th are kept, and a token is dropped if those above it reach top_p.
    """

    temperature: Tensor  # [N] fp32; 0 takes the largest logit, the lowest id among equals
    reach: Tensor  # [N] fp32: temperature * log(min_p); -inf keeps all
    top_k: Tensor  # [N] int32; 0 keeps all
    top_p: Tensor  # [N] fp32; 1 keeps all
    uniform: Tensor  # [N] fp64 in [0, 1)


@dataclass(frozen=True, slots=True)
class PenaltyColumns:
    """Penalties as columns, one element per penalised row.

    `counts[line]`, `[V]` int32, holds for each id twice its number of occurrences in the output, plus 1 if the prompt
    contains it."""

    rows: Tensor  # [M] int64, rows of the logits
    lines: Tensor  # [M] int64, lines of counts
    repetition: Tensor  # [M] fp32, over prompt and output
    frequency: Tensor  # [M] fp32, per occurrence in the output
    presence: Tensor  # [M] fp32, once for ids in the output

"""How each row of a batch samples, as columns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One element per row of the logits.

    The tokens kept are, in this order: those within `reach` of the largest logit (min_p); of these the `top_k`
    largest; of these the largest that together reach the share `top_p` of their probability. Equal logits are kept
    or dropped together: all that equal the k-th are kept, and a token goes if those above it reach top_p.
    """

    temperature: Tensor  # [N] fp32; 0: the largest logit, the lowest id among equals
    reach: Tensor  # [N] fp32: temperature * log(min_p); -inf keeps all
    top_k: Tensor  # [N] int32; 0 keeps all
    top_p: Tensor  # [N] fp32; 1 keeps all
    uniform: Tensor  # [N] fp64 in [0, 1)


@dataclass(frozen=True, slots=True)
class PenaltyColumns:
    """One element per penalised row. `counts[line]`, `[V]` int32, holds for each id twice the number of times that it
    was put out, plus 1 if the prompt has it."""

    rows: Tensor  # [M] int64, into the logits
    lines: Tensor  # [M] int64, into counts
    repetition: Tensor  # [M] fp32, over prompt and output
    frequency: Tensor  # [M] fp32, per occurrence in the output
    presence: Tensor  # [M] fp32, once for ids in the output

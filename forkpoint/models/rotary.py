"""Rotary positions: how far each pair of a head's dims turns with a token, also in models that were stretched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Pair `i` of a head's first `dim` dims turns by `frequencies[i]`; cos and sin are times `gain`.

    `max_len` is the sequence that a stretched model was stretched to.
    """

    frequencies: tuple[float, ...] = ()
    gain: float = 1.0
    max_len: int = 0

    @property
    def dim(self) -> int:
        """0: no positions."""
        return 2 * len(self.frequencies)

    def table(self, max_len: int) -> Tensor:
        """`[max_len, dim]` fp32: cos, then sin."""
        angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * torch.tensor(self.frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self.gain)


NO_POSITIONS: Final = Rotary()


def frequencies(dim: int, theta: float) -> Tensor:
    """`theta^(-2i / dim)`, fp32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def llama3(plain: Tensor, factor: float, low: float, high: float, length: int) -> Tensor:
    """Of Llama 3.1: pairs that turn less than `low` times in `length` tokens are slowed, above `high` times none."""
    kept = ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def yarn(plain: Tensor, theta: float, factor: float, fast: float, slow: float, length: int, whole: bool) -> Tensor:
    """Of YaRN (Peng et al. 2023): the same, between `slow` and `fast` turns, by the pair's place; `whole`: rounded."""
    dim = 2 * len(plain)
    first, last = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    slowed = ((torch.arange(dim // 2) - first) / (last - first or 0.001)).clamp(0, 1)
    return plain / factor * slowed + plain * (1 - slowed)


def yarn_gain(factor: float, scale: float, scale_all: float) -> float:
    """What YaRN multiplies cos and sin by; the scales are DeepSeek's, 0 where there are none."""

    def gain(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    return gain(scale) / gain(scale_all) if scale and scale_all else gain(1.0)

"""Rotary positions: how far each pair of a head's dims turns per token, including models with extended context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """How heads are rotated: pair `i` of the first `dim` dims by `frequencies[i]` radians per token.

    Cos and sin are multiplied by `gain`. `max_len` is the length in tokens to which the model's context was extended; 0
    if it was not.
    """

    frequencies: tuple[float, ...] = ()
    gain: float = 1.0
    max_len: int = 0

    @property
    def dim(self) -> int:
        """The number of rotated dims; 0 if the model has no positions."""
        return 2 * len(self.frequencies)

    def table(self, max_len: int) -> Tensor:
        """Compute cos, then sin, for each position: `[max_len, dim]` fp32.

        It is on the host whatever the default device, so that all devices use the same bits.
        """
        positions = torch.from_numpy(np.arange(max_len, dtype=np.float32)).unsqueeze(1)
        angles = positions * torch.from_numpy(np.asarray(self.frequencies, np.float32))
        return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self.gain)


NO_POSITIONS: Final = Rotary()


def frequencies(dim: int, theta: float) -> Tensor:
    """Compute `theta^(-2i / dim)` for pairs i, `[dim / 2]` fp32 (Su et al. 2021)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def proportional(dim: int, theta: float, share: float) -> Tensor:
    """Compute the frequencies of a full rotation, with 0 for all but the first `share` of pairs."""
    plain = frequencies(dim, theta)
    plain[int(share * dim // 2) :] = 0.0
    return plain


def interleaved_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Return for each pair which of three positions rotates it: 0 time, 1 row, 2 column.

    Pairs 1, 4, 7.. are rotated by rows and pairs 2, 5, 8.. by columns, as many of each as their section has; all other
    pairs by time.
    """
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def alternating_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Return for each pair which of three positions rotates it: 0 time, 1 row, 2 column.

    `sections` are the numbers of pairs for time, rows and columns. Rows and columns, which have as many, take turns
    first, and time has the last pairs (Wei et al. 2025, "VideoRoPE").
    """
    time, rows, _ = sections
    return (1, 2) * rows + (0,) * time


def llama3(plain: Tensor, factor: float, low: float, high: float, length: int) -> Tensor:
    """Return frequencies scaled as in Llama 3.1.

    Pairs that turn fewer than `low` times in `length` tokens are divided by `factor`. Pairs that turn more than `high`
    times are kept. Pairs in between are interpolated.
    """
    kept = ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def yarn(plain: Tensor, theta: float, factor: float, fast: float, slow: float, length: int, whole: bool) -> Tensor:
    """Return frequencies scaled as in YaRN (Peng et al. 2023), where slow pairs are divided by `factor`.

    Pairs between those that turn `fast` and `slow` times in `length` tokens are interpolated by their index. With
    `whole` the two bounds are rounded to whole indices. `theta` is the base of `plain`.
    """
    dim = 2 * len(plain)
    first, last = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    slowed = ((torch.arange(dim // 2) - first) / (last - first or 0.001)).clamp(0, 1)
    return plain / factor * slowed + plain * (1 - slowed)


def yarn_gain(factor: float, scale: float, scale_all: float) -> float:
    """Return YaRN's factor for cos and sin when the context is extended `factor` times.

    `scale` and `scale_all` are DeepSeek's `mscale` and `mscale_all_dim`; 0 if absent.
    """

    def gain(by: float) -> float:
        return 0.1 * by * math.log(max(factor, 1.0)) + 1.0

    if scale and scale_all:
        return gain(scale) / gain(scale_all)
    return gain(1.0)

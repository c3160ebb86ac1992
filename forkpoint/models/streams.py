"""Layers whose hidden state is several residual streams.

A mixer joins the streams into the input of a part, and puts the part's output back into the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from forkpoint.models.config import Block
from forkpoint.models.context import ForwardContext

# Maps streams `[T, N, H]` to a part's input `[T, H]` and the function from the part's output `[T, H]` to new streams.
Mixer: TypeAlias = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """Return `sum_n weights[t, n] * streams[t, n]` in fp32, for `streams[T, N, H]` and `weights[T, N, ...]` fp32.

    The terms are added one after another, so that a token's bits do not depend on the batch.
    """
    total = weights[:, 0] * streams[:, 0].float()
    for n in range(1, streams.shape[1]):
        total = total + weights[:, n] * streams[:, n].float()
    return total


def summed(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a dim, which stays as one of size 1. The terms are added as by `weighted`."""
    first, *others = x.unbind(dim)
    total = first.clone()
    for other in others:
        total += other
    return total.unsqueeze(dim)


class StreamLayer:
    """A layer of parts that run one after another, each between the two halves of its mixer.

    `before`, if given, maps the streams `[T, N, H]` to what is added to them first.
    """

    def __init__(self, parts: Sequence[tuple[Mixer, Block]], before: Block | None = None) -> None:
        self._parts, self._before = parts, before

    def __call__(self, streams: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, None]:
        """Map streams `[T, N, H]` to streams. There is no other residual."""
        if self._before is not None:
            streams = streams + self._before(streams, ctx)
        for mixer, block in self._parts:
            x, put_back = mixer(streams)
            streams = put_back(block(x, ctx))
        return streams, None

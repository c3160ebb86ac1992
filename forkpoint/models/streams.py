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

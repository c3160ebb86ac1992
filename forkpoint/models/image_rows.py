"""Extra rows of a model's tables, where the image tokens of a step find their embeddings and rotations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ImageRows:
    """The last rows of a model's tables of embeddings and of cos and sin, which the images of each step fill.

    Image token `i` of a step has the id `first_id + i`. If it has three rotary positions, line `first_line + i` rotates
    it. The model then treats it like a token of text. The tables keep their addresses, so recorded steps read them too.
    """

    def __init__(
        self, embedding: Tensor, first_id: int, cos_sin: Tensor | None, first_line: int, axes: Sequence[int]
    ) -> None:
        """`embedding` is `[ids, H]` and `cos_sin` `[lines, R]`. Both include the rows for images.

        `axes` says which of the three positions rotates each pair of dims. It is empty if image tokens are rotated like
        text. `cos_sin` then has no lines for them.
        """
        self.first_id, self.first_line, self.has_axes = first_id, first_line, bool(axes)
        self.most_tokens = len(embedding) - first_id
        self._embedding, self._cos_sin = embedding, cos_sin
        self._axes = torch.tensor((*axes, *axes), dtype=torch.int64, device=embedding.device)

    def fill_ids(self, embedded: Sequence[Tensor]) -> None:
        """Store the embeddings of a step's image tokens, `[tokens, H]` for each image."""
        num_tokens = sum(map(len, embedded))
        assert num_tokens <= self.most_tokens, "a step has more tokens of images than rows for them"
        torch.cat([*embedded], out=self._embedding[self.first_id : self.first_id + num_tokens])

    def fill_lines(self, rope: Tensor) -> None:
        """Store lines that rotate by the three positions `rope` `[3, L]` int64."""
        assert self._cos_sin is not None, "no token has three positions"
        lines = rope.index_select(0, self._axes).T  # [L, R]: column r of a line is copied from this line of text
        table = self._cos_sin.gather(0, lines.abs())
        sin = slice(table.shape[1] // 2, None)
        table[:, sin] = torch.where(lines[:, sin] < 0, -table[:, sin], table[:, sin])  # cos(-x) is cos(x)
        self._cos_sin[self.first_line : self.first_line + len(table)] = table

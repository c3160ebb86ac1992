"""The output head, whose ids are cut over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.models.cuts import padded_span
from forkpoint.models.layers import Projection
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable


class OutputHead:
    """From hidden states to logits. Ranks share what little says which id is the likeliest, and all logits only where
    somebody asks for them."""

    def __init__(self, ops: OpTable, ranks: Ranks, weight: Tensor, vocab_size: int, guesses: bool = False) -> None:
        """`weight[padded ids of this rank, H]`; `guesses`: somebody asks for some."""
        self._own, self._ops, self._ranks, self._vocab_size = Projection(ops, weight), ops, ranks, vocab_size
        self._first, end = padded_span(vocab_size, ranks)
        self._count = max(0, min(end, vocab_size) - self._first)  # the rest is padding
        self._shortlist = ops.shortlist(weight, self._count) if guesses and ops.shortlist else None

    def own(self, hidden: Tensor) -> Tensor:
        """`hidden[R, H]` -> this rank's logits, padded, in the model's dtype."""
        return self._own(hidden)

    def whole(self, own: Tensor) -> Tensor:
        """Those of all ranks `[R, vocab_size]`."""
        return own if self._ranks.size == 1 else self._ranks.gather(own)[:, : self._vocab_size].contiguous()

    def guess(self, hidden: Tensor) -> Tensor:
        """The likeliest ids `[R]` of `hidden[R, H]`, by a shortlist where there is one, which reads less than
        the head; whether they are right is said by the head itself."""
        if self._shortlist is None:
            return self.likeliest(self.own(hidden))[0]
        ids, tops = self._shortlist(hidden)
        return ids if self._ranks.size == 1 else self._of_all(ids, tops)[0]

    def likeliest(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """What `greedy` says of the logits of all ranks."""
        if self._ranks.size == 1 or self._ranks.gathers_at_once(own):
            return self._ops.greedy(self.whole(own))
        if self._count > 0:
            ids = self._ops.greedy(own[:, : self._count])[0]
            tops = own.gather(1, ids[:, None])[:, 0].float()  # NaN if one is
        else:
            ids = torch.zeros(len(own), dtype=torch.int64, device=own.device)
            tops = torch.full((len(own),), -torch.inf, device=own.device)
        return self._of_all(ids, tops)

    def _of_all(self, ids: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from each rank's likeliest ids `[R]` among its own, and their logits `[R]` fp32."""
        told = torch.stack([tops.view(torch.int32), (ids + self._first).int()], dim=1)
        found = self._ranks.gather(told).view(len(ids), -1, 2)
        rank, finite = self._ops.greedy(found[..., 0].contiguous().view(torch.float32))  # the first has the lowest ids
        return found[..., 1].gather(1, rank[:, None])[:, 0].long(), finite

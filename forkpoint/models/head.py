"""The output head, whose rows (one for each id) are split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.models.cuts import padded_span
from forkpoint.models.layers import Projection
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.table import OpTable


class OutputHead:
    """The output head, which computes logits from hidden states.

    To find the likeliest id, ranks exchange only their best id and its logit. They gather all logits only on request.
    """

    def __init__(self, ops: OpTable, ranks: Ranks, weight: Tensor, vocab_size: int, guesses: bool = False) -> None:
        """Take the head's rows `weight[padded ids of this rank, H]`. Set `guesses` if `guess` will be called."""
        self._own, self._ops, self._ranks, self._vocab_size = Projection(ops, weight), ops, ranks, vocab_size
        self._first, end = padded_span(vocab_size, ranks)
        self._count = max(0, min(end, vocab_size) - self._first)  # ids of this rank; the remaining rows are padding
        self._shortlist = ops.shortlist(weight, self._count) if guesses and ops.shortlist else None

    def own(self, hidden: Tensor) -> Tensor:
        """Compute this rank's logits from `hidden[R, H]`, with padding, in the model's dtype."""
        return self._own(hidden)

    def whole(self, own: Tensor) -> Tensor:
        """Return the logits `[R, vocab_size]` of all ranks, from what `own` returned. Ranks must call it together."""
        if self._ranks.size == 1:
            return own
        return self._ranks.gather(own)[:, : self._vocab_size].contiguous()

    def guess(self, hidden: Tensor) -> Tensor:
        """Return the likeliest ids `[R]` int64 for `hidden[R, H]`. They may be wrong, and the head must verify them.

        If the table has a shortlist operator, it is used, because it reads less than the whole head. Ranks call it
        together.
        """
        if self._shortlist is None:
            return self.likeliest(self.own(hidden))[0]
        ids, tops = self._shortlist(hidden)
        return ids if self._ranks.size == 1 else self._of_all(ids, tops)[0]

    def likeliest(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest ids `[R]` int64, and whether rows' logits are finite, as the operator `greedy` does.

        `own` is what `own` returned. Ranks must call it together.
        """
        if self._ranks.size == 1 or self._ranks.gathers_at_once(own):
            return self._ops.greedy(self.whole(own))
        if self._count > 0:
            ids = self._ops.greedy(own[:, : self._count])[0]
            tops = own.gather(1, ids[:, None])[:, 0].float()  # NaN if any logit is NaN
        else:
            ids = torch.zeros(len(own), dtype=torch.int64, device=own.device)
            tops = torch.full((len(own),), -torch.inf, device=own.device)
        return self._of_all(ids, tops)

    def _of_all(self, ids: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `likeliest` does, from this rank's likeliest ids `[R]` and their logits `[R]` fp32."""
        own = torch.stack([tops.view(torch.int32), (ids + self._first).int()], dim=1)
        found = self._ranks.gather(own).view(len(ids), -1, 2)
        # ties go to the first rank, which has the lowest ids
        rank, finite = self._ops.greedy(found[..., 0].contiguous().view(torch.float32))
        return found[..., 1].gather(1, rank[:, None])[:, 0].long(), finite

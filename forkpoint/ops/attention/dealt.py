"""Attention over keys that are dealt to ranks: each rank attends to the keys it keeps, and the outputs are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.ranks import Ranks

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deal:
    """The tokens of every row that a rank keeps. Ranks take turns with runs of `interleave` tokens.

    A rank stores its tokens of a row without gaps in its blocks. If a run divides a block, all ranks need a row's next
    block at the same token, so that one id serves them all. The rank's block is the unit of allocation, not the part of
    it that a kernel reads at a time.
    """

    rank: int = 0
    num_ranks: int = 1
    interleave: int = 1

    def check(self, block_size: int) -> None:
        """Raise ConfigError if blocks of `block_size` tokens do not consist of whole runs."""
        if block_size % self.interleave:
            raise ConfigError(f"an interleave of {self.interleave} tokens does not divide a block of {block_size}")

    def owns(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Return for each of these positions of a row whether the rank keeps its token."""
        owned: npt.NDArray[np.bool_] = positions // self.interleave % self.num_ranks == self.rank
        return owned

    def places(self, positions: Positions) -> Positions:
        """Return, for the token at each position, how many earlier tokens of the row its own rank keeps."""
        return positions // (self.num_ranks * self.interleave) * self.interleave + positions % self.interleave

    def count(self, lens: Positions) -> Positions:
        """Return how many of the first `lens` tokens of each row the rank keeps."""
        rounds, rest = np.divmod(lens, self.num_ranks * self.interleave)
        counts: Positions = rounds * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return counts


ALL: Final = Deal()  # one rank keeps them


def attend_dealt(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, scale: float, ranks: Ranks
) -> Tensor:
    """Attention of rows with one query, `q[N, Hq, D]`, over keys that are dealt to ranks -> `[N, Hq, Dv]`, fp32.

    Queries and outputs are the same on all ranks. `index` has the rank's block table, and as `kv_lens` the number of
    each row's visible keys that the rank keeps. A row with drafts counts as one row for each of its tokens.
    """
    seen = torch.stack([_seen(q[row], k_cache, v_cache, index, row, scale) for row in range(len(q))])
    parts = ranks.gather(seen).view(*seen.shape[:2], ranks.size, -1)
    weights = parts[..., -1:].softmax(dim=2)  # each rank's share of the sum of exponentials
    answer: Tensor = (parts[..., :-1] * weights).sum(dim=2)
    return answer


def _seen(q: Tensor, k_cache: Tensor, v_cache: Tensor, index: AttentionIndex, row: int, scale: float) -> Tensor:
    """Attend with one query `[Hq, D]` to the rank's keys.

    Returns `[Hq, Dv + 1]`: the output, followed by the logarithm of the sum of exponentials. Without keys these are
    zeros and the logarithm of zero.
    """
    (_, heads, size, dim), count = k_cache.shape, index.on_host()[1][row]
    blocks = index.block_table[index.table_rows[row], : -(-count // size)].long()
    keys, values = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :count].float() for cache in (k_cache, v_cache))
    scores = q.float().view(heads, -1, dim) @ keys.mT * scale  # heads that share keys are the rows of one product
    total = scores.logsumexp(dim=-1, keepdim=True)
    answer = (scores - total).exp() @ values
    return torch.cat([answer, total], dim=-1).flatten(0, 1)

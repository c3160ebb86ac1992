"""Log-probabilities of tokens, and their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.sched.plan import TokenLogprobs

PROMPT_TILE_ROWS = 128  # prompt positions whose logits exist at once; more would need too much memory


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of `N` positions, which are on the host once the step is done.

    `ids[N, 2 + T]` int64 has the position's token, its rank from 1, and the `T` likeliest tokens. `logprobs[N, 1 + T]`
    fp32 has the log-probability of the token, then those of the likeliest. `asked` maps the number of each position to
    the number of likeliest tokens that its request wants.
    """

    asked: Mapping[int, int]
    ids: Tensor
    logprobs: Tensor

    def fetch(self) -> dict[int, TokenLogprobs]:
        """Return the entries by the number of their position. Call it once the step is done."""
        return {
            number: TokenLogprobs(token, logprob, rank, tuple(top_ids[:top]), tuple(top_logprobs[:top]))
            for (number, top), (token, rank, *top_ids), (logprob, *top_logprobs) in zip(
                self.asked.items(), self.ids.tolist(), self.logprobs.tolist(), strict=True
            )
        }


def score(logits: Tensor, token_ids: Tensor, asked: Mapping[int, int], ops: OpTable, platform: Platform) -> Scores:
    """Start the copy to the host of log-probabilities under `logits[N, V]`: of `token_ids[N]`, and of the likeliest.

    Returns the scores, to be read after an event. `asked` maps the number of each position to the number of likeliest
    tokens; it is not empty. The lower id of equally likely tokens comes first, so a row's result does not depend on
    other rows.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    num_top = min(max(asked.values()), logits.shape[1])
    top, ranks = ops.top_ids(logits, token_ids, num_top)
    token_ids = token_ids[:, None]
    values = logprobs.gather(1, torch.cat([token_ids, top], dim=1))
    ids = torch.cat([token_ids, ranks[:, None], top], dim=1)
    return Scores(asked, platform.to_host(ids), platform.to_host(values))

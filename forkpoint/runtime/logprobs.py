"""Log-probabilities on their way from the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.platforms.platform import Platform
from forkpoint.sched.plan import TokenLogprobs

PROMPT_TILE_ROWS = 128  # positions whose logits exist at once while prompt log-probabilities are made


@dataclass(frozen=True, slots=True)
class Scores:
    """Of `N` positions, on the host once the step is done: `ids[N, 2 + T]` int64 (the token, its rank from 1, the `T`
    likeliest) and `logprobs[N, 1 + T]` fp32 (of the token, of the likeliest). `asked`: the number of each position for
    those who ask, and how many of the likeliest it is to have."""

    asked: Mapping[int, int]
    ids: Tensor
    logprobs: Tensor

    def fetch(self) -> dict[int, TokenLogprobs]:
        """By the positions' numbers; to be called once the step is done."""
        return {
            number: TokenLogprobs(token, logprob, rank, tuple(top_ids[:top]), tuple(top_logprobs[:top]))
            for (number, top), (token, rank, *top_ids), (logprob, *top_logprobs) in zip(
                self.asked.items(), self.ids.tolist(), self.logprobs.tolist(), strict=True
            )
        }


def score(logits: Tensor, token_ids: Tensor, asked: Mapping[int, int], platform: Platform) -> Scores:
    """Log-probabilities under `logits[N, V]` of `token_ids[N]` and of the likeliest, as many as are `asked` for."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    ids, values = [token_ids[:, None], ranks], [chosen]
    num_top = min(max(asked.values()), logprobs.shape[1])
    if num_top:
        top_values, top_ids = torch.topk(logprobs, num_top, dim=-1)
        ids.append(top_ids)
        values.append(top_values)
    return Scores(asked, platform.to_host(torch.cat(ids, dim=1)), platform.to_host(torch.cat(values, dim=1)))

"""How each row of the batch samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkpoint.params import SamplingParams
from forkpoint.sched.plan import AddedRow


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the penalties look at: which ids the prompt has, and how often each id was put out."""

    in_prompt: Tensor  # [V] bool
    outputs: Tensor  # [V] int32


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row samples, in the form that the sampler wants."""

    params: SamplingParams
    seed: int
    is_plain_greedy: bool  # the largest logit, and nothing else is asked for
    is_unadjusted: bool  # logits are used as they are
    bias: tuple[Tensor, Tensor] | None  # (ids, additions)
    stop_ids: Tensor | None  # forbidden until min_tokens are out
    counts: TokenCounts | None

    @classmethod
    def create(cls, added: AddedRow, vocab_size: int, device: torch.device) -> RowSampling:
        """Counts are restored from the ids known, so that a resumed row goes on as before."""
        params, counts, bias, stops = added.params, None, None, None
        if params.has_penalties:
            ids = torch.from_numpy(added.token_ids.astype(np.int64)).to(device)
            prompt, outputs = ids[: added.num_prompt_tokens], ids[added.num_prompt_tokens :]
            in_prompt = torch.bincount(prompt, minlength=vocab_size) > 0
            counts = TokenCounts(in_prompt, torch.bincount(outputs, minlength=vocab_size).int())
        if params.logit_bias:
            biased = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
            values = torch.tensor(list(biased.values()), dtype=torch.float32, device=device)
            bias = (torch.tensor(list(biased), dtype=torch.int64, device=device), values)
        if params.min_tokens and added.stop_token_ids:
            known = [token for token in added.stop_token_ids if token < vocab_size]
            stops = torch.tensor(known, dtype=torch.int64, device=device)
        unadjusted = counts is None and bias is None and stops is None
        plain = unadjusted and params.is_greedy and params.logprobs is None
        return cls(params, added.seed, plain, unadjusted, bias, stops, counts)

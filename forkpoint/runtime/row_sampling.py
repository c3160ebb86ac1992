"""Sampling parameters of rows, in the form that the sampler takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.params import SamplingParams
from forkpoint.platforms.platform import Platform
from forkpoint.sched.plan import AddedRow

GREEDY_TEMPERATURE = 1e-5  # below it sampling is greedy, like in vLLM


class TokenCounts:
    """Counts of ids for penalties.

    `table[row, id]`, int32, is twice the number of times that the row put the id out, plus 1 if its prompt has the id.
    Memory for all `num_rows` lines is taken when the first row with penalties comes.
    """

    def __init__(self, num_rows: int, vocab_size: int, platform: Platform) -> None:
        self.table = torch.zeros((0, vocab_size), dtype=torch.int32, device=platform.device)
        self._num_rows, self._platform = num_rows, platform

    def restore(self, added: AddedRow) -> None:
        """Count all ids of an added row anew, so that a resumed request continues as before."""
        if not len(self.table):
            self.table = self.table.new_empty((self._num_rows, self.table.shape[1]))  # lines are cleared as rows come
        line = self.table[added.row]
        ids = self._platform.upload(added.token_ids.astype(np.int64))
        prompt, outputs = ids[: added.num_prompt_tokens], ids[added.num_prompt_tokens :]
        line.zero_()
        line.index_fill_(0, prompt, 1)
        line.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))

    def record(self, lines: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
        """Count output `token_ids[i]` of line `lines[i]`, or only where `kept[i]`. All are `[M]` on the device."""
        _count_outputs(self.table, lines, token_ids, kept)

    def with_drafts(self, lines: list[int], index: Tensor, token_ids: Tensor) -> Tensor:
        """Return copies of these lines of the table, to which draft `token_ids[i]` is added in copy `index[i]`."""
        copies = self.table[lines]
        _count_outputs(copies, index, token_ids)
        return copies


def _count_outputs(table: Tensor, lines: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
    places = lines * table.shape[1] + token_ids
    often = torch.full_like(places, 2, dtype=torch.int32) if kept is None else 2 * kept.int()
    table.view(-1).index_add_(0, places, often)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row samples."""

    params: SamplingParams
    seed: int
    line: int  # the row's line in the counts
    is_plain_greedy: bool  # the request wants the likeliest token and nothing else
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None  # (ids, additions)
    stop_ids: npt.NDArray[np.int64] | None  # not allowed before min_tokens outputs
    counts: TokenCounts | None

    @classmethod
    def create(cls, added: AddedRow, counts: TokenCounts) -> RowSampling:
        """Return the sampling of an added row. All rows share `counts`; a row with penalties gets its line restored."""
        params, bias, stops = added.params, None, None
        vocab_size = counts.table.shape[1]
        if params.has_penalties:
            counts.restore(added)
        if params.logit_bias:
            biased = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
            bias = (np.fromiter(biased, np.int64, len(biased)), np.asarray(list(biased.values()), np.float32))
        if params.min_tokens and added.stop_token_ids and params.structured_outputs is None:
            stops = np.asarray([token for token in added.stop_token_ids if token < vocab_size], np.int64)
        plain = params.is_greedy and params.logprobs is None and not params.has_penalties
        plain = plain and bias is None and stops is None
        return cls(params, added.seed, added.row, plain, bias, stops, counts if params.has_penalties else None)

    @property
    def temperature(self) -> float:
        """The temperature; 0 if sampling is greedy."""
        return self.params.temperature if self.params.temperature >= GREEDY_TEMPERATURE else 0.0

"""Logits to token ids. No row's result depends on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.params import SamplingParams
from forkpoint.runtime.row_sampling import RowSampling
from forkpoint.sched.plan import IntArray, TokenLogprobs

GREEDY_TEMPERATURE = 1e-5  # below it the largest logit wins, as in vLLM
TOP_P_CANDIDATES = 1024  # tokens put in order first; all of them only where their probabilities fall short of top_p
PROMPT_TILE_ROWS = 128  # positions whose logits exist at once while prompt log-probabilities are made


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids[i]` for row `i` of the logits, meaningless where not `finite[i]`; `logprobs` by index, for rows
    that asked."""

    token_ids: Tensor  # [N] int64
    finite: Tensor  # [N] bool
    logprobs: Known | None


@dataclass(frozen=True, slots=True)
class Known:
    """Log-probabilities that are on the host already."""

    entries: Any

    def fetch(self) -> Any:
        return self.entries


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit's id `[N]` int64, and whether it is finite (a NaN makes it not so)."""
    top, token_ids = logits.max(dim=-1)
    return token_ids, torch.isfinite(top)


class UniformSource:
    """One number in [0, 1) per (seed, output position), from Philox keyed by the seed with the position as its
    counter, so that it depends neither on the batch nor on preemption."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state

    def draw(self, seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
        raw = np.empty(len(seeds), np.uint64)
        key, counter = self._state["state"]["key"], self._state["state"]["counter"]
        for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            key[0], counter[0] = seed, position
            self._philox.state = self._state
            raw[i] = self._philox.random_raw()
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sampler:
    """Applies, in vLLM's order: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p."""

    def __init__(self, ops: Any = None, platform: Any = None, uniform: UniformSource | None = None) -> None:
        self._uniform = uniform or UniformSource()

    def sample(self, logits: Tensor, rows: Sequence[RowSampling], positions: IntArray) -> Sampled:
        """`logits[N, V]` of any float type; `positions[i]` is how many outputs row `i` has already."""
        if all(row.is_plain_greedy for row in rows):
            return Sampled(*greedy(logits), None)
        raw = logits.float()
        failed = _non_finite(raw.amax(dim=-1))
        adjusted = self._adjust(raw, rows, positions)
        token_ids = adjusted.argmax(dim=-1)
        random = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_TEMPERATURE and i not in failed]
        if random:
            picks = [rows[i] for i in random]
            uniform = self._uniform.draw([row.seed for row in picks], [int(positions[i]) for i in random])
            chosen = torch.from_numpy(uniform).to(raw.device)
            token_ids[random] = _sample_rows(adjusted[random], picks, chosen)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in failed]
        for i, row in enumerate(rows):
            if row.counts is not None:
                row.counts.outputs[token_ids[i]] += 1
        finite = torch.isfinite(raw.amax(dim=-1))
        return Sampled(token_ids, finite, Known(_logprobs(raw, asked, token_ids, rows)))

    def _adjust(self, raw: Tensor, rows: Sequence[RowSampling], positions: IntArray) -> Tensor:
        """Logits after bias, forbidden ids and penalties; a copy where anything changes."""
        if all(row.is_unadjusted for row in rows):
            return raw
        logits = raw.clone()
        for i, row in enumerate(rows):
            if row.bias is not None:
                logits[i, row.bias[0]] += row.bias[1]
            if row.stop_ids is not None and int(positions[i]) < row.params.min_tokens:
                logits[i, row.stop_ids] = -torch.inf
            if row.counts is not None:
                logits[i] = _penalised(logits[i], row)
        return logits


def prompt_logprobs(logits: Tensor, next_ids: Tensor, num_top: int, platform: Any = None) -> Known:
    """Of `logits[N, V]`, for the tokens `next_ids[N]` that do follow, and the `num_top` likeliest."""
    return Known(_describe(torch.log_softmax(logits.float(), dim=-1), next_ids, num_top))


def _non_finite(maxima: Tensor) -> tuple[int, ...]:
    """Rows whose largest logit is NaN (which any NaN makes it) or infinite."""
    finite = torch.isfinite(maxima)
    return () if bool(finite.all()) else tuple(torch.nonzero(~finite).flatten().tolist())


def _penalised(logits: Tensor, row: RowSampling) -> Tensor:
    """Repetition over prompt and output, frequency and presence over the output; `logits[V]`."""
    counts, params = row.counts, row.params
    assert counts is not None
    if params.repetition_penalty != 1.0:
        seen = counts.in_prompt | (counts.outputs > 0)
        factor = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - params.frequency_penalty * counts.outputs
    return logits - params.presence_penalty * (counts.outputs > 0)


def _sample_rows(logits: Tensor, rows: Sequence[RowSampling], uniform: Tensor) -> Tensor:
    """Inverse-CDF samples `[N]`; `uniform[N]` float64. Rows that keep the whole vocabulary are not sorted."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    scaled = logits / temperature[:, None]
    min_p = torch.tensor([row.params.min_p for row in rows], device=logits.device)
    floor = scaled.amax(dim=-1) + torch.log(min_p)  # -inf where min_p is 0
    scaled = scaled.masked_fill(scaled < floor[:, None], -torch.inf)
    cut = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    whole = [i for i in range(len(rows)) if i not in set(cut)]
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if whole:
        out[whole] = _invert(torch.softmax(scaled[whole], dim=-1).double(), uniform[whole])
    for i in cut:
        out[i] = _sample_cut(scaled[i], rows[i].params, uniform[i : i + 1])
    return out


def _sample_cut(logits: Tensor, params: SamplingParams, uniform: Tensor) -> Tensor:
    """One row, `logits[V]`, under top_k, then top_p. Only the likeliest tokens are put in order where they do."""
    vocab = logits.shape[0]
    has_top_k = params.top_k > 0
    values, ids = torch.topk(logits, min(vocab, params.top_k if has_top_k else TOP_P_CANDIDATES))
    probs = torch.exp(values - torch.logsumexp(values if has_top_k else logits, dim=-1)).double()
    if not has_top_k and float(probs.sum()) < params.top_p:
        values, ids = torch.sort(logits, descending=True, stable=True)
        probs = torch.softmax(values, dim=-1).double()
    before = torch.cumsum(probs, dim=-1) - probs
    kept = probs if params.top_p >= 1.0 else probs * (before < params.top_p)
    return ids[_invert(kept[None], uniform)[0]]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds `uniform * total`; `probs[N, V]` float64."""
    cumulative = torch.cumsum(probs, dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _logprobs(
    raw: Tensor, asked: Sequence[int], token_ids: Tensor, rows: Sequence[RowSampling]
) -> dict[int, TokenLogprobs]:
    if not asked:
        return {}
    index = list(asked)
    wanted = [rows[i].params.logprobs or 0 for i in index]
    entries = _describe(torch.log_softmax(raw[index], dim=-1), token_ids[index], max(wanted))
    return {
        i: TokenLogprobs(e.token_id, e.logprob, e.rank, e.top_ids[:top], e.top_logprobs[:top])
        for i, e, top in zip(index, entries, wanted, strict=True)
    }


def _describe(logprobs: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = torch.topk(logprobs, min(num_top, logprobs.shape[1]), dim=-1)
    columns = (token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist())
    return [
        TokenLogprobs(token, logprob, rank, tuple(top), tuple(top_logprobs))
        for token, logprob, rank, top, top_logprobs in zip(*columns, strict=True)
    ]

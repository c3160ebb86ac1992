"""Sampling in torch, for CPUs. `apply_penalties`, `sample_rows` and `top_ids` branch on values, so they would wait for
a device."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns

SLACK = 16  # candidates beyond those asked for, so that logits equal to the last one are rarely cut off
FEW = 1024  # logits sorted first; all logits are sorted only if these do not reach top_p


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids `[N]` int64 of the largest logits of `logits[N, V]`, the lowest id among equals, and whether the
    largest is finite, `[N]` bool."""
    top, token_ids = logits.max(dim=-1)
    return token_ids, torch.isfinite(top)


def top_ids(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Sort each row of `logits[N, V]` from the largest to the smallest, equal logits by id.

    Returns the first ids `[N, num_top]` int64, and the rank `[N]` int64, from 1, of `token_ids[N]`.
    """
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=1) + 1
    for row, token_id in enumerate(token_ids.tolist()):
        ranks[row] += (logits[row, :token_id] == chosen[row]).sum()
    if not num_top:
        return token_ids.new_empty(len(logits), 0), ranks
    count = min(num_top + SLACK, logits.shape[1])
    values, ids = torch.topk(logits, count, dim=1)
    if count < logits.shape[1] and (values[:, -1] == values[:, num_top - 1]).any():
        # topk cut through equal logits, at an arbitrary id.
        return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :num_top], ranks
    ids = torch.sort(ids, dim=1).values
    order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)[:, :num_top], ranks


def apply_penalties(logits: Tensor, counts: Tensor, columns: PenaltyColumns) -> None:
    """Apply penalties to the rows `columns.rows` of `logits[N, V]` fp32, in place.

    `counts[lines, V]` int32 are twice the occurrences of an id in the output, plus 1 for ids of the prompt. A positive
    logit of an id in either is divided by `repetition`, a negative one multiplied. Then `frequency` is subtracted for
    each occurrence in the output, and `presence` once if there is any. Waits for the device.
    """
    names = (columns.rows, columns.lines, columns.repetition, columns.frequency, columns.presence)
    for row, line, repetition, frequency, presence in zip(*(column.tolist() for column in names), strict=True):
        seen = torch.nonzero(counts[line])[:, 0]
        outputs, x = counts[line, seen] >> 1, logits[row, seen]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits[row, seen] = x - frequency * outputs - presence * (outputs > 0)


def apply_bitmasks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of ids whose bit is 0 to -inf, in place: `logits[N, V]` fp32, `rows[M]` int64,
    `bits[M, ceil(V / 32)]` int32, id `i` at bit `i % 32` of word `i // 32`."""
    vocab = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))


def sample_rows(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Sample one id per row of `logits[N, V]`, by the inverse CDF in the order of ids, among the tokens `columns` keep.

    Returns the ids `[N]` int64 and whether the largest logit is finite, `[N]` bool; without it the id means nothing.
    """
    token_ids, finite = greedy(logits)
    names = (columns.temperature, columns.reach, columns.top_k, columns.top_p, columns.uniform)
    for i, (temperature, reach, top_k, top_p, uniform) in enumerate(
        zip(*(column.tolist() for column in names), strict=True)
    ):
        if temperature > 0 and finite[i]:
            row = logits[i].float()
            token_ids[i] = _sample(row, row[token_ids[i]], temperature, reach, top_k, top_p, uniform)
    return token_ids, finite


def _sample(
    row: Tensor, top: Tensor, temperature: float, reach: float, top_k: int, top_p: float, uniform: float
) -> Tensor:
    threshold = top + reach
    if 0 < top_k < len(row):
        threshold = torch.maximum(threshold, torch.topk(row, top_k, sorted=False).values.min())
    if float(threshold) > -torch.inf:
        ids = torch.nonzero(row >= threshold)[:, 0]
        kept = row[ids]
        weights = _weights(kept, top, temperature)
        if top_p < 1.0:
            above_p = kept >= _top_p_threshold(kept, weights, top, temperature, top_p)
            ids, weights = ids[above_p], weights[above_p]
        return ids[_invert(weights, uniform)]
    weights = _weights(row, top, temperature)
    if top_p >= 1.0:
        return _invert(weights, uniform)
    ids = torch.nonzero(row >= _top_p_threshold(row, weights, top, temperature, top_p))[:, 0]
    return ids[_invert(weights[ids], uniform)]


def _top_p_threshold(logits: Tensor, weights: Tensor, top: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the smallest of the largest logits that together have the share `top_p` of the weight."""
    share = top_p * weights.sum(dtype=torch.float64)
    values = torch.topk(logits, min(FEW, len(logits))).values
    if len(logits) > FEW and _weights(values, top, temperature).sum(dtype=torch.float64) < share:
        values = torch.sort(logits, descending=True).values
    ordered = _weights(values, top, temperature).double()
    above = torch.cumsum(ordered, dim=0) - ordered
    return values[int((above < share).sum()) - 1]


def _weights(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    return torch.exp((logits - top) / temperature)


def _invert(weights: Tensor, uniform: float) -> Tensor:
    """Return the first index whose cumulative weight exceeds `uniform` of the total."""
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    total = cumulative[-1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)

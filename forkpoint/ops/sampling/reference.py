"""Sampling in torch. `sample_rows` looks at its data on the host: it is for CPUs and for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns

FEW = 1024  # logits put in order first; all of them only where they fall short of top_p


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits[N, V]` -> (ids of the largest `[N]` int64, lowest first; `[N]` bool: it is neither NaN nor infinite)."""
    top, token_ids = logits.max(dim=-1)
    return token_ids, torch.isfinite(top)


def apply_penalties(logits: Tensor, counts: Tensor, columns: PenaltyColumns) -> None:
    """In place on `logits[N, V]` fp32."""
    count = counts.index_select(0, columns.lines)
    outputs = count >> 1
    chosen = logits.index_select(0, columns.rows)
    factor = columns.repetition[:, None]
    repeated = torch.where(chosen > 0, chosen / factor, chosen * factor)
    chosen = torch.where(count > 0, repeated, chosen)
    chosen = chosen - columns.frequency[:, None] * outputs - columns.presence[:, None] * (outputs > 0)
    logits.index_copy_(0, columns.rows, chosen)


def apply_bitmasks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """-inf for the ids whose bit is 0: `logits[N, V]` fp32 in place, `rows[M]` int64, `bits[M, ceil(V / 32)]` int32,
    id `i` at bit `i % 32` of word `i // 32`."""
    vocab = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))


def sample_rows(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """One id per row of `logits[N, V]`, by inverse CDF in the order of ids over the tokens that `columns` keep.

    -> (`[N]` int64, `[N]` bool: the largest logit is neither NaN nor infinite; else the id is meaningless).
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


def kept_threshold(row: Tensor, temperature: float, reach: float, top_k: int, top_p: float) -> Tensor:
    """The smallest logit kept, a scalar; -inf where all are."""
    top = row.max()
    threshold = top + reach
    if 0 < top_k < len(row):
        threshold = torch.maximum(threshold, torch.topk(row, top_k, sorted=False).values.min())
    if top_p >= 1.0:
        return threshold
    if float(threshold) == -torch.inf and len(row) > FEW:
        total = _weights(row, top, temperature).sum(dtype=torch.float64)
        values = torch.topk(row, FEW).values
        if float(_weights(values, top, temperature).sum(dtype=torch.float64)) < top_p * float(total):
            values = torch.sort(row, descending=True).values
    else:
        values = torch.sort(row[row >= threshold], descending=True).values
        total = _weights(values, top, temperature).sum(dtype=torch.float64)
    weights = _weights(values, top, temperature).double()
    above = torch.cumsum(weights, dim=0) - weights
    return values[int((above < top_p * total).sum()) - 1]


def _sample(
    row: Tensor, top: Tensor, temperature: float, reach: float, top_k: int, top_p: float, uniform: float
) -> Tensor:
    threshold = kept_threshold(row, temperature, reach, top_k, top_p)
    if float(threshold) == -torch.inf:
        return _invert(_weights(row, top, temperature), uniform)
    kept = torch.nonzero(row >= threshold)[:, 0]
    return kept[_invert(_weights(row[kept], top, temperature), uniform)]


def _weights(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    return torch.exp((logits - top) / temperature)


def _invert(weights: Tensor, uniform: float) -> Tensor:
    """The first index whose cumulative weight exceeds `uniform` of the total."""
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    total = cumulative[-1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)

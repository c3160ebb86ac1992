"""Tests which tokens may be sampled: the reference against a brute-force definition, and against transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forkpoint.ops.sampling import reference
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns


@dataclass(frozen=True)
class Cut:
    """How one row samples."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def reach(self) -> float:
        return self.temperature * math.log(self.min_p) if self.min_p else -math.inf


def columns(cuts: list[Cut], uniform: list[float]) -> SamplingColumns:
    return SamplingColumns(
        torch.tensor([cut.temperature for cut in cuts]),
        torch.tensor([cut.reach for cut in cuts]),
        torch.tensor([cut.top_k for cut in cuts], dtype=torch.int32),
        torch.tensor([cut.top_p for cut in cuts]),
        torch.tensor(uniform, dtype=torch.float64),
    )


def probabilities(row: Tensor, cut: Cut) -> Tensor:
    """Return the probability of each id in float64, by the definition, one class of equal logits after the other."""
    x = row.double()
    weights = torch.exp((x - x.max()) / cut.temperature)
    kept = x >= row.max() + torch.tensor(cut.reach, dtype=torch.float32)
    if 0 < cut.top_k < len(row):
        kept &= x >= x.sort(descending=True).values[cut.top_k - 1]
    if cut.top_p < 1:
        # The values in rising order: a class stays while the classes above it hold less than the share.
        values, member = x[kept].unique(return_inverse=True)
        masses = torch.zeros(len(values), dtype=torch.float64).index_add_(0, member, weights[kept])
        above = masses.flip(0).cumsum(0).flip(0) - masses
        kept &= x >= values[above < cut.top_p * masses.sum()].min()
    weights = torch.where(kept, weights, 0.0)
    return weights / weights.sum()


def middles(probability: Tensor) -> tuple[list[int], list[float]]:
    """Ids that can be sampled, and for each the middle of its part of [0, 1); parts too thin to aim at left out."""
    ids = torch.nonzero(probability > 1e-6)[:, 0]
    ends = torch.cumsum(probability, 0)[ids]
    return ids.tolist(), (ends - probability[ids] / 2).tolist()


CUTS = st.builds(
    Cut,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01, 0.999]),
)


@given(cut=CUTS, seed=st.integers(0, 10**6), size=st.integers(1, 50), step=st.sampled_from([0.0, 0.5, 2.0]))
def test_the_reference_keeps_what_the_definition_keeps(cut: Cut, seed: int, size: int, step: float) -> None:
    """`step` rounds the logits, so that many are equal."""
    row = torch.from_numpy(np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3)
    row = (row / step).round() * step if step else row
    ids, uniform = middles(probabilities(row, cut))
    found, finite = reference.sample_rows(row.expand(len(ids), -1), columns([cut] * len(ids), uniform))
    assert finite.all()
    assert found.tolist() == ids


@pytest.mark.parametrize("cut", [Cut(top_k=20, top_p=0.95), Cut(top_p=0.7), Cut(min_p=0.02), Cut(0.7, 0.01, 50, 0.8)])
def test_samples_follow_the_distribution_of_transformers(cut: Cut) -> None:
    """A chi-squared test over the tokens of each row, at a level of one in a million."""
    count, vocab = 4000, 300
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(cut.temperature)])
    if cut.min_p:
        processors.append(transformers.MinPLogitsWarper(cut.min_p))
    if cut.top_k:
        processors.append(transformers.TopKLogitsWarper(cut.top_k))
    if cut.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(cut.top_p))
    expected = torch.softmax(processors(torch.zeros((1, 1), dtype=torch.int64), row[None].clone())[0], dim=-1).double()
    uniform = np.random.default_rng(0).random(count).tolist()
    ids, _ = reference.sample_rows(row.expand(count, -1), columns([cut] * count, uniform))
    seen = torch.bincount(ids, minlength=vocab).double()
    assert not seen[expected == 0].any()
    kept = expected > 0
    statistic = float(((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    counts = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 4, 7, 0]], dtype=torch.int32)
    values = [torch.tensor([value]) for value in (2.0, 0.25, 0.5)]
    reference.apply_penalties(logits, counts, PenaltyColumns(torch.tensor([0]), torch.tensor([1]), *values))
    assert logits.tolist() == [[1.0, -4.0, 0.0, -5.25, 1.0], [1.0] * 5]


def test_bitmasks_by_hand() -> None:
    logits = torch.zeros(2, 40)
    bits = torch.tensor([[-(2**31) | 1, 128]], dtype=torch.int32)
    reference.apply_bitmasks(logits, torch.tensor([1]), bits)
    assert torch.isfinite(logits[0]).all()
    assert torch.nonzero(torch.isfinite(logits[1]))[:, 0].tolist() == [0, 31, 39]

"""Sampling kernels against the references: the same ids, and so the same tokens kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from forkpoint.ops.sampling import choose_kernel, kernel, reference
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns
from tests.ops.test_sampling import Cut, columns, middles, probabilities
from tests.ops.triton_cases import DEVICE, ON_GPU

VOCAB = 151_936 if ON_GPU else 1_000
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU, as many tiles as a real vocabulary has on a GPU."""
    if not ON_GPU:
        monkeypatch.setattr(kernel, "GREEDY_TILE", 128)
        monkeypatch.setattr(kernel, "ELEMENTWISE_TILE", 512)
        monkeypatch.setattr(kernel, "RANK_TILE", 256)
        monkeypatch.setattr(choose_kernel, "TILE", 64)
        monkeypatch.setattr(choose_kernel, "FEW", 128)
        monkeypatch.setattr(choose_kernel, "WIDE", 8)
    yield


def logits_of(count: int, dtype: torch.dtype, scale: float, seed: int = 0) -> Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def on_device(values: SamplingColumns) -> SamplingColumns:
    return SamplingColumns(*(getattr(values, field.name).to(DEVICE) for field in fields(values)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy(dtype: torch.dtype) -> None:
    logits = logits_of(7, dtype, 3.0)
    logits[1, 5] = torch.nan
    logits[2, VOCAB - 1] = torch.inf
    logits[3] = -torch.inf
    logits[4, [VOCAB - 2, 130, 700]] = 50.0
    logits[5] = 0.0
    logits[6, VOCAB - 1] = 60.0
    ids, finite = kernel.greedy(logits.to(DEVICE))
    expected, known = reference.greedy(logits)
    assert finite.tolist() == known.tolist() == [True, False, False, False, True, True, True]
    assert ids.cpu()[known].tolist() == expected[known].tolist()
    assert ids.cpu()[4] == 130
    assert ids.cpu()[5] == 0
    assert ((ids >= 0) & (ids < VOCAB)).all(), "an id that is meaningless is an id all the same"


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_equal_logits(dtype: torch.dtype, num_top: int) -> None:
    """Against a stable sort of all logits: few values, all equal, and none equal."""
    logits = torch.cat([logits_of(2, dtype, 3.0).round(), logits_of(2, dtype, 3.0, 1)])
    logits[1] = 0.5
    chosen = torch.tensor([VOCAB - 1, 300, 17, int(logits[3].argmax())])
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    wanted = (order == chosen[:, None]).int().argmax(dim=1) + 1
    for found, ranks in (
        reference.top_ids(logits, chosen, num_top),
        kernel.top_ids(logits.to(DEVICE), chosen.to(DEVICE), num_top),
    ):
        assert found.tolist() == order[:, :num_top].tolist()
        assert ranks.tolist() == wanted.tolist()


def test_order_of_logits_that_are_not_finite() -> None:
    logits = logits_of(2, torch.float32, 3.0)
    logits[0, 5:30], logits[1] = torch.nan, torch.nan
    found, ranks = kernel.top_ids(logits.to(DEVICE), torch.tensor([7, 9]).to(DEVICE), 20)
    assert ((found >= 0) & (found < VOCAB)).all() and ((ranks > 0) & (ranks <= VOCAB + 1)).all()


# What the tiles' maxima settle (few candidates), what takes passes over the row, and what keeps all.
FEW = [Cut(top_k=1), Cut(top_k=5, top_p=0.8), Cut(0.7, 0.3, 7, 0.9), Cut(top_p=0.3), Cut(min_p=0.5), Cut(2.0, 1.0)]
MANY = [Cut(top_k=300, top_p=0.9), Cut(2.0, top_p=0.98), Cut(3.0, 0.001), Cut(0.5, 0.001, 400, 0.99)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_kept_tokens(dtype: torch.dtype, scale: float) -> None:
    """Numbers in the middle of a token's part of [0, 1) must give that token: first, last and some between."""
    cuts, uniform, expected, picked = [], [], [], []
    rows = logits_of(len(FEW) + len(MANY), dtype, scale, seed=1)
    for i, cut in enumerate([*FEW, *MANY]):
        ids, parts = middles(probabilities(rows[i].float(), cut))
        for j in sorted({0, len(ids) // 2, len(ids) - 1}):
            cuts.append(cut)
            uniform.append(parts[j])
            expected.append(ids[j])
            picked.append(i)
    values, logits = columns(cuts, uniform), rows[picked].contiguous()
    assert reference.sample_rows(logits, values)[0].tolist() == expected
    ids, finite = choose_kernel.sample_rows(logits.to(DEVICE), on_device(values))
    assert finite.all()
    assert ids.tolist() == expected


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_min_p_between_two_values_of_the_dtype(dtype: torch.dtype, sign: float) -> None:
    """Many logits lie just above and just below the smallest that min_p keeps."""
    top, near = (8.0, 5.0) if sign > 0 else (-2.0, -5.0)
    above = torch.tensor(near, dtype=dtype)
    below = torch.nextafter(above, torch.tensor(-torch.inf, dtype=dtype))
    logits = torch.full((2, VOCAB), -30.0, dtype=dtype)
    logits[:, 5], logits[:, 100:500], logits[:, 600:900] = top, below, above
    reach = (float(above) + float(below)) / 2 - top
    values = columns([Cut()] * 2, [0.9, 0.35])
    values = replace(values, reach=torch.full((2,), reach))
    expected = reference.sample_rows(logits, values)[0].tolist()
    assert all(600 <= token < 900 for token in expected)
    assert choose_kernel.sample_rows(logits.to(DEVICE), on_device(values))[0].tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_keep_all_or_take_the_largest(dtype: torch.dtype) -> None:
    cuts = [Cut(), Cut(0.2), Cut(0.0), Cut(5.0), Cut(top_k=VOCAB), Cut(0.0, top_k=5, top_p=0.5), Cut(), Cut()]
    uniform = [0.2, 0.9, 0.9, 0.5, 0.7, 0.1, 0.0, 1 - 2**-53]
    logits = logits_of(len(cuts), dtype, 2.0, seed=2)
    values = columns(cuts, uniform)
    ids, finite = choose_kernel.sample_rows(logits.to(DEVICE), on_device(values))
    assert finite.all()
    assert ids.tolist() == reference.sample_rows(logits, values)[0].tolist()


@pytest.mark.parametrize("cut", [Cut(), Cut(0.0), Cut(top_k=3), Cut(top_p=0.5), Cut(min_p=0.1)])
def test_rows_that_are_not_finite_fail_alone(cut: Cut) -> None:
    logits = logits_of(4, torch.float32, 2.0)
    logits[0, 3], logits[1, 999], logits[2] = torch.nan, torch.inf, -torch.inf
    ids, finite = choose_kernel.sample_rows(logits.to(DEVICE), on_device(columns([cut] * 4, [0.4] * 4)))
    assert finite.tolist() == [False, False, False, True]
    assert ((ids >= 0) & (ids < VOCAB)).all()


def test_forbidden_ids_are_not_sampled() -> None:
    """Under a mask few logits are finite, fewer than top_k asks for."""
    logits = torch.full((5, VOCAB), -torch.inf)
    logits[:, [3, 64, 65, VOCAB - 1]] = torch.tensor([1.0, 0.0, 2.0, 1.5])
    cuts = [Cut(), Cut(top_k=20), Cut(top_k=20, top_p=0.99), Cut(top_p=0.99), Cut(min_p=0.01)]
    for uniform, expected in ((0.0, 3), (0.16, 3), (0.2, 64), (0.99, VOCAB - 1)):
        values = columns(cuts, [uniform] * 5)
        assert reference.sample_rows(logits, values)[0].tolist() == [expected] * 5
        assert choose_kernel.sample_rows(logits.to(DEVICE), on_device(values))[0].tolist() == [expected] * 5


def test_penalties_and_bitmasks() -> None:
    logits = logits_of(4, torch.float32, 2.0)
    counts = torch.randint(0, 7, (6, VOCAB), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    found, device_counts = logits.to(DEVICE, copy=True), counts.to(DEVICE)
    values = ([1, 3], [5, 0], [1.5, 1.0], [0.25, -0.5], [0.0, 2.0])
    penalties = PenaltyColumns(*(torch.tensor(value) for value in values))
    reference.apply_penalties(logits, counts, penalties)
    kernel.apply_penalties(found, device_counts, PenaltyColumns(*(torch.tensor(v, device=DEVICE) for v in values)))
    torch.testing.assert_close(found.cpu(), logits)
    bits = torch.randint(-(2**31), 2**31, (2, -(-VOCAB // 32)), generator=torch.Generator().manual_seed(1)).int()
    rows = torch.tensor([2, 0])
    reference.apply_bitmasks(logits, rows, bits)
    kernel.apply_bitmasks(found, rows.to(DEVICE), bits.to(DEVICE))
    torch.testing.assert_close(found.cpu(), logits)

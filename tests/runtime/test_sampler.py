"""The sampler against transformers' logits processors, and its independence of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor

from forkpoint.ops.select import torch_table
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.logprobs import score
from forkpoint.runtime.row_sampling import RowSampling, TokenCounts
from forkpoint.runtime.sampler import Sampled, Sampler, UniformSource
from forkpoint.sched.plan import AddedRow, TokenLogprobs, TokenMasks
from forkpoint.worker.memory import SAMPLER_BYTES_PER_LOGIT

VOCAB = 61
GRID = 512


def row(
    params: SamplingParams,
    prompt: Sequence[int] = (1,),
    outputs: Sequence[int] = (),
    seed: int = 0,
    stops: Any = (),
    counts: TokenCounts | None = None,
    line: int = 0,
) -> RowSampling:
    ids = np.asarray([*prompt, *outputs], np.int32)
    added = AddedRow(line, "r", ids, len(prompt), params, seed, tuple(stops), np.empty(0, np.int32))
    return RowSampling.create(added, counts or TokenCounts(64, VOCAB, CpuPlatform()))


def sampler(uniform: UniformSource | None = None) -> Sampler:
    found = Sampler(torch_table(), CpuPlatform())
    found._uniform = uniform or found._uniform
    return found


def logprobs_of(sampled: Sampled) -> dict[int, TokenLogprobs]:
    return sampled.logprobs.fetch() if sampled.logprobs is not None else {}


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


def sample(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int] | None = None) -> Sampled:
    return sampler().sample(logits, rows, np.asarray(positions or [0] * len(rows), np.int32))


class GridSource(UniformSource):
    """Evenly spaced numbers, so that counts are probabilities."""

    def draw(self, seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
        return (np.arange(len(seeds)) + 0.5) / len(seeds)


def frequencies(logits: Tensor, sampling: RowSampling) -> Tensor:
    """How often each token comes out of `logits[V]`."""
    expanded = logits.expand(GRID, VOCAB).contiguous()
    ids = sampler(GridSource()).sample(expanded, [sampling] * GRID, np.zeros(GRID, np.int32)).token_ids
    return torch.bincount(ids, minlength=VOCAB) / GRID


def oracle(logits: Tensor, params: SamplingParams, ids: Sequence[int] = (1,)) -> Tensor:
    """Probabilities by transformers' processors, for parameters whose order of application is the same."""
    processors = transformers.LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    return torch.softmax(processors(torch.tensor([list(ids)]), logits[None].clone()), dim=-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_k": -1},
        {"top_k": 1},
        {"top_p": 0.8},
        {"top_p": 0.001},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 10, "top_p": 0.6, "min_p": 0.02, "temperature": 1.3},
        {"repetition_penalty": 1.7, "top_p": 0.9},
        {"top_k": 1000},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_distribution_is_that_of_transformers(options: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**options)
    logits = logits_of(1, seed)[0]
    seen = [3, 7, 7, 40]
    found = frequencies(logits, row(params, seen[:2], seen[2:]))
    expected = oracle(logits, params, seen)
    assert (found - expected).abs().max() < 2 / GRID
    assert not found[expected == 0].any()


def test_greedy_and_near_zero_temperatures_take_the_largest() -> None:
    logits = logits_of(4)
    for temperature in (0.0, 1e-6, 1e-300):
        rows = [row(SamplingParams(temperature=temperature))] * 4
        assert sample(logits, rows).token_ids.tolist() == logits.argmax(dim=-1).tolist()


def test_presence_and_frequency_count_outputs_only() -> None:
    logits = logits_of(1)
    prompt, outputs = [5, 5, 6], [7, 7, 7, 8, 6]
    params = SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.3)
    counts = torch.bincount(torch.tensor(outputs), minlength=VOCAB)
    expected = torch.softmax(logits[0] - 0.3 * counts - 0.7 * (counts > 0), dim=-1)
    found = frequencies(logits[0], row(params, prompt, outputs))
    assert (found - expected).abs().max() < 2 / GRID


def test_bias_then_min_tokens() -> None:
    logits = logits_of(1)
    params = SamplingParams(temperature=0.0, logit_bias={9: 100.0, 11: 50.0}, min_tokens=3, max_tokens=9)
    sampling = row(params, stops=[9])
    assert sample(logits, [sampling], [2]).token_ids.tolist() == [11]
    assert sample(logits, [sampling], [3]).token_ids.tolist() == [9]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={VOCAB + 5: 100.0}, min_tokens=1)
    logits = logits_of(1)
    assert sample(logits, [row(params, stops=[VOCAB])]).token_ids.tolist() == [int(logits.argmax())]


MIXED = [
    {},
    {"temperature": 0.0},
    {"top_k": 7, "logprobs": 3},
    {"top_p": 0.7, "temperature": 1.4},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 0},
    {"logit_bias": {4: 5.0}, "frequency_penalty": -1.0},
    {"top_k": 3, "top_p": 0.9, "logprobs": 20},
]


@pytest.mark.parametrize("seed", range(4))
def test_a_row_does_not_depend_on_the_batch(seed: int) -> None:
    def rows_from(first: int) -> list[RowSampling]:
        """Rows as they enter a batch, where `first` other rows come before."""
        counts = TokenCounts(64, VOCAB, CpuPlatform())
        params = [SamplingParams(**options) for options in MIXED]  # type: ignore[arg-type]
        return [row(p, [1, 2], [3], seed + i, (), counts, first + i) for i, p in enumerate(params)]

    rows = rows_from(0)
    logits, positions = logits_of(len(rows), seed), list(range(len(rows)))
    together = sample(logits, rows, positions)
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    others, single = rows_from(3), rows_from(1)
    shuffled = sample(logits[order], [others[i] for i in order], [positions[i] for i in order])
    found, elsewhere = logprobs_of(together), logprobs_of(shuffled)
    for i in range(len(rows)):
        alone = sample(logits[i : i + 1], [single[i]], [positions[i]])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[order.index(i)]
        assert logprobs_of(alone).get(0) == found.get(i) == elsewhere.get(order.index(i))


def test_a_seed_names_the_same_tokens_and_positions_differ() -> None:
    logits = torch.zeros(40, VOCAB)
    rows = [row(SamplingParams(), seed=2**63 - 1)] * 40
    first = sample(logits, rows, list(range(40))).token_ids.tolist()
    assert first == sample(logits, rows, list(range(40))).token_ids.tolist()
    assert len(set(first)) > 10
    assert first != sample(logits, [row(SamplingParams(), seed=5)] * 40, list(range(40))).token_ids.tolist()


def test_uniform_numbers_are_philox_of_seed_and_position() -> None:
    source = UniformSource()
    drawn = source.draw([3, 3, 2**63 - 1], [0, 70, 9])
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        for seed, position in ((3, 0), (3, 70), (2**63 - 1, 9))
    ]
    assert drawn.tolist() == expected == source.draw([3, 3, 2**63 - 1], [0, 70, 9]).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"logprobs": 2}, {"top_k": 4}])
def test_non_finite_rows_fail_alone(bad: float, options: dict[str, Any]) -> None:
    params, logits = SamplingParams(**options), logits_of(3)
    good = sample(logits, [row(params)] * 3)
    logits[1, 17] = bad
    found = sample(logits, [row(params)] * 3)
    assert found.finite.tolist() == [True, False, True]
    assert found.token_ids[[0, 2]].tolist() == good.token_ids[[0, 2]].tolist()
    logits[2] = -torch.inf
    assert sample(logits, [row(params)] * 3).finite.tolist() == [True, False, False]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(1)
    params = SamplingParams(temperature=0.0, logit_bias={9: 100.0}, logprobs=4)
    entry = logprobs_of(sample(logits, [row(params)]))[0]
    expected = torch.log_softmax(logits[0], dim=-1)
    values, ids = expected.topk(4)
    assert entry.token_id == 9
    assert entry.logprob == pytest.approx(float(expected[9]))
    assert entry.rank == int((expected > expected[9]).sum()) + 1
    assert list(entry.top_ids) == ids.tolist()
    assert list(entry.top_logprobs) == pytest.approx(values.tolist())


def test_prompt_logprobs_of_following_tokens() -> None:
    logits = logits_of(5)
    following = torch.tensor([3, 60, 0, 7, 7])
    expected = torch.log_softmax(logits, dim=-1)
    for i, entry in score(logits, following, dict.fromkeys(range(5), 2), torch_table(), CpuPlatform()).fetch().items():
        assert entry.logprob == pytest.approx(float(expected[i, following[i]]))
        assert entry.top_ids[0] == int(logits[i].argmax())
        assert len(entry.top_ids) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equally_likely_tokens_are_listed_by_id_whatever_others_ask_for(dtype: torch.dtype) -> None:
    """Each row's list and rank are those of the whole vocabulary in order, cut to what the row asks for."""
    logits = (logits_of(6) / 3).round().to(dtype)  # few values
    logits[5] = 0.0
    chosen = torch.tensor([7, 60, 0, 33, 12, 58])
    for most in (1, 3, 20):
        asked = dict(zip(range(6), (0, 1, 2, 3, most, most), strict=True))
        found = score(logits, chosen, asked, torch_table(), CpuPlatform()).fetch()
        for i, line in enumerate(logits.tolist()):
            order = sorted(range(VOCAB), key=lambda token: (-line[token], token))
            assert list(found[i].top_ids) == order[: asked[i]]
            assert found[i].rank == order.index(int(chosen[i])) + 1


def test_min_p_of_one_keeps_the_largest() -> None:
    logits = logits_of(3)
    assert sample(logits, [row(SamplingParams(min_p=1.0))] * 3).token_ids.tolist() == logits.argmax(-1).tolist()


def test_bf16_logits() -> None:
    logits = logits_of(3).bfloat16()
    assert sample(logits, [row(SamplingParams(temperature=0.0))] * 3).token_ids.tolist() == logits.argmax(-1).tolist()
    assert len(logprobs_of(sample(logits, [row(SamplingParams(logprobs=1))] * 3))) == 3


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_top_p_over_a_large_vocabulary(scale: float) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * scale
    params = SamplingParams(top_p=0.9)
    rows = [row(params)] * GRID
    ids = sampler(GridSource()).sample(logits.expand(GRID, -1), rows, np.zeros(GRID, np.int32)).token_ids
    found = torch.bincount(ids, minlength=3000) / GRID
    expected = oracle(logits, params)
    assert (found - expected).abs().max() < 2 / GRID
    assert not found[expected == 0].any()


def test_sampled_ids_are_counted() -> None:
    """A row that goes on samples as one that was resumed from its ids does."""
    params = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    counts, logits = TokenCounts(64, VOCAB, CpuPlatform()), logits_of(2)
    rows = [row(params, [1, 4], (), counts=counts, line=line) for line in (5, 2)]
    outputs: list[list[int]] = [[], []]
    for position in range(8):
        resumed = [row(params, [1, 4], done) for done in outputs]
        fresh = [int(sample(logits[i : i + 1], [resumed[i]], [position]).token_ids[0]) for i in range(2)]
        found = sample(logits, rows, [position] * 2).token_ids.tolist()
        assert found == fresh
        for i in range(2):
            outputs[i].append(found[i])
    assert len(set(outputs[0])) > 3, "the penalties must have changed something"


def test_counts_take_their_room_at_once() -> None:
    """The room that is left for the counts next to the arena is all that they ever need."""
    params, counts = SamplingParams(presence_penalty=1.0), TokenCounts(9, VOCAB, CpuPlatform())
    row(SamplingParams(), counts=counts)
    assert counts.table.numel() == 0
    row(params, counts=counts, line=2)
    place = counts.table.data_ptr()
    row(params, counts=counts, line=8)
    assert counts.table.shape == (9, VOCAB) and counts.table.data_ptr() == place
    assert counts.table.element_size() * counts.table.numel() < SAMPLER_BYTES_PER_LOGIT * 9 * VOCAB


def mask_of(*allowed: Sequence[int]) -> npt.NDArray[np.int32]:
    bits = np.zeros((len(allowed), -(-VOCAB // 32)), np.uint32)
    for i, ids in enumerate(allowed):
        for token in ids:
            bits[i, token // 32] |= np.uint32(1 << token % 32)
    return bits.view(np.int32)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "presence_penalty": 1.0}])
def test_masked_rows_sample_what_they_may(options: dict[str, Any]) -> None:
    params, logits = SamplingParams(**options), logits_of(64)
    counts = TokenCounts(64, VOCAB, CpuPlatform())
    rows = [row(params, seed=i, counts=counts, line=i) for i in range(64)]
    free = sample(logits, rows).token_ids
    counts = TokenCounts(64, VOCAB, CpuPlatform())
    rows = [row(params, seed=i, counts=counts, line=i) for i in range(64)]
    allowed = (0, 31, 32, VOCAB - 1)
    masks = TokenMasks(np.arange(0, 64, 2, dtype=np.int32), mask_of(*[allowed] * 32))
    found = sampler().sample(logits, rows, np.zeros(64, np.int32), masks)
    assert found.finite.all()
    assert set(found.token_ids[::2].tolist()) == set(allowed)
    assert found.token_ids[1::2].tolist() == free[1::2].tolist()


def test_a_mask_over_non_finite_logits_does_not_hide_them() -> None:
    logits, params = logits_of(2), SamplingParams(temperature=0.0)
    logits[0, 5] = torch.nan
    masks = TokenMasks(np.arange(2, dtype=np.int32), mask_of([7], [7, 8]))
    found = sampler().sample(logits, [row(params)] * 2, np.zeros(2, np.int32), masks)
    assert found.finite.tolist() == [False, True]


WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "to_list")


def test_nothing_looks_at_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for a device is not called, but by the operators of a CPU."""
    greedy = torch_table().greedy
    table = replace(
        torch_table(),
        sample_rows=lambda logits, columns: greedy(logits),
        apply_penalties=lambda logits, counts, columns: None,
        top_ids=lambda logits, token_ids, num_top: (torch.topk(logits, num_top).indices, token_ids),
    )
    counts = TokenCounts(64, VOCAB, CpuPlatform())
    rows = [
        row(SamplingParams(**options), [1, 2], [3], i, [9], counts, i)  # type: ignore[arg-type]
        for i, options in enumerate([*MIXED, {"min_tokens": 3}])
    ]
    logits = logits_of(len(rows))
    masks = TokenMasks(np.asarray([0, 3], np.int32), mask_of([7], [7, 8]))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch:
        for name in WAITING:
            patch.setattr(torch.Tensor, name, refuse, raising=False)
        patch.setattr(torch, "nonzero", refuse)
        sampled = Sampler(table, CpuPlatform()).sample(logits, rows, np.zeros(len(rows), np.int32), masks)
        scores = score(logits, sampled.token_ids, dict.fromkeys(range(len(rows)), 2), table, CpuPlatform())
    assert len(scores.fetch()) == len(rows)

"""The selective scan of all tables against a per-token oracle in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.parameters import ScanInputs, ScanParams
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from tests.ops.cpu_table import cpp
from tests.ops.recurrence_cases import padded_pool, rows, segments
from tests.ops.triton_cases import DEVICE, ON_GPU, behind, copy_pool, on_device, padded, relative_error, triton_ops

CHANNELS, VALUES = 40, 12  # a whole program of channels and a part; fewer values than lanes
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if ON_GPU else 2e-2}


TABLES = {"torch": torch_table, "cpp": cpp, "triton": triton_ops}


@pytest.fixture(scope="module", params=TABLES)
def ops(request: pytest.FixtureRequest) -> OpTable:
    return TABLES[request.param]()


def params(seed: int = 0) -> ScanParams:
    generator = torch.Generator().manual_seed(seed)
    rates = -torch.exp(torch.empty(CHANNELS, VALUES).uniform_(-4, 3, generator=generator))
    bias, skip = torch.randn(CHANNELS, generator=generator), torch.randn(CHANNELS, generator=generator)
    return ScanParams(rates.to(DEVICE), bias.to(DEVICE), skip.to(DEVICE))


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> ScanInputs:
    """Strided views, as projections and splits give them. The last steps lie around softplus' threshold of 20."""
    generator = torch.Generator().manual_seed(seed)
    x, dt, z = torch.randn(3, num_tokens, CHANNELS + 8, generator=generator).to(dtype)[..., 3 : 3 + CHANNELS]
    b, c = torch.randn(num_tokens, 2 * VALUES + 5, generator=generator).to(dtype)[:, 5:].chunk(2, dim=1)
    dt[-1, :3] = torch.tensor([19.9, 20.1, 80.0]).to(dtype)
    return ScanInputs(*(value.to(DEVICE) for value in (x, dt, b, c, z)))


def by_token(given: ScanInputs, constants: ScanParams, state: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs `[T, D]`, states after each token `[T, D, N]`)."""
    rates, bias, skip = (value.double().cpu() for value in (constants.A, constants.dt_bias, constants.skip))
    state, outputs, states = state.double().cpu(), [], []
    for x, dt, b, c, z in zip(*(value.double().cpu() for value in given), strict=True):
        step = F.softplus(dt + bias)
        state = torch.exp(step[:, None] * rates) * state + torch.outer(step * x, b)
        outputs.append((state @ c + skip * x) * F.silu(z))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def pools() -> Tensor:
    torch.manual_seed(0)
    return copy_pool(padded_pool(8, (CHANNELS, VALUES)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_is_the_recurrence(ops: OpTable, dtype: torch.dtype) -> None:
    lens, src, dst = [66, 3, 2], [1, -1, 5], [2, -1, 5]
    saves = [[(64, 0), (66, 3)], [(3, 4)], [(2, -1)]]
    pool, given, constants = pools(), inputs(sum(lens), dtype), params()
    before = copy_pool(pool)
    got = ops.scan_prefill(given, constants, pool, on_device(segments(lens, src, dst, saves)))
    assert got.dtype == dtype
    written, start = set(), 0
    for n, length in enumerate(lens):
        own = ScanInputs(*(value[start : start + length] for value in given))
        state = before[src[n]] if src[n] >= 0 else torch.zeros_like(before[0])
        want, states = by_token(own, constants, state)
        assert relative_error(got[start : start + length], want) <= BOUND[dtype]
        for position, slot in [*saves[n], (length, dst[n])]:
            if slot >= 0:
                assert relative_error(pool[slot], states[position - 1]) <= BOUND[torch.float32]
                written.add(slot)
        start += length
    assert all(torch.equal(pool[slot], before[slot]) for slot in range(8) if slot not in written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_the_recurrence(ops: OpTable, dtype: torch.dtype) -> None:
    src, dst = [0, 3, -1, 4], [0, 5, 6, -1]
    pool, given, constants = pools(), inputs(4, dtype), params()
    before = copy_pool(pool)
    out = torch.empty(4, CHANNELS, dtype=dtype, device=DEVICE)
    assert ops.scan_decode(given, constants, pool, on_device(rows(src, dst)), out) is out
    for row in range(4):
        state = before[src[row]] if src[row] >= 0 else torch.zeros_like(before[0])
        want, states = by_token(ScanInputs(*(value[row : row + 1] for value in given)), constants, state)
        assert relative_error(out[row], want[0]) <= BOUND[dtype]
        if dst[row] >= 0:
            assert relative_error(pool[dst[row]], states[0]) <= BOUND[torch.float32]
    assert all(torch.equal(pool[slot], before[slot]) for slot in (1, 2, 3, 4, 7))


@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_cuts_and_neighbours(ops: OpTable, kept_in: torch.dtype) -> None:
    pool, given, constants = pools().to(kept_in), inputs(130), params()
    want, _ = by_token(given, constants, pool[0])
    # From one slot to the same, over the start of the third chunk.
    whole = ops.scan_prefill(given, constants, pool, on_device(segments([130], [0], [0], [[(64, 2), (128, 1)]])))
    assert relative_error(whole, want) <= BOUND[kept_in]
    other = inputs(3, seed=3)
    mixed = ScanInputs(*(torch.cat((a, b[64:])) for a, b in zip(other, given, strict=True)))
    saves: list[list[tuple[int, int]]] = [[], [(64, 5), (66, 6)]]
    rest = ops.scan_prefill(mixed, constants, pool, on_device(segments([3, 66], [-1, 2], [4, 3], saves)))
    assert torch.equal(rest[3:], whole[64:]) and torch.equal(pool[3], pool[0])
    assert torch.equal(pool[5], pool[1]) and torch.equal(pool[6], pool[3])
    few = ScanInputs(*(value[:3] for value in given))
    together = ops.scan_decode(few, constants, pool, on_device(rows([0, 2, 5], [6, 7, -1])))
    alone = ops.scan_decode(ScanInputs(*(value[1:2] for value in few)), constants, pool, on_device(rows([2], [3])))
    assert torch.equal(together[1:2], alone) and torch.equal(pool[3], pool[7])


def test_padding_of_recorded_steps_is_harmless() -> None:
    ops, constants, given = triton_ops(), params(), inputs(9)
    pool = pools()
    want_pool, index = copy_pool(pool), on_device(segments([3, 6], [1, -1], [1, 2], [[(3, 5)], [(6, 4)]]))
    want = ops.scan_prefill(given, constants, want_pool, index)
    wide = ScanInputs(*(behind(value, 119) for value in given))
    assert torch.equal(ops.scan_prefill(wide, constants, pool, padded(index))[:9], want)
    assert torch.equal(pool, want_pool)
    few = ScanInputs(*(behind(value[:2], 2) for value in given))
    ops.scan_decode(few, constants, pool, on_device(rows([1, 4, -1, -1], [1, 3, -1, -1])))
    ops.scan_decode(ScanInputs(*(value[:2] for value in given)), constants, want_pool, on_device(rows([1, 4], [1, 3])))
    assert torch.equal(pool, want_pool)


def test_states_in_bfloat16(ops: OpTable) -> None:
    given, constants, pool = inputs(5, torch.bfloat16), params(), pools()
    rounded = pool.bfloat16()
    ops.scan_prefill(given, constants, rounded, on_device(segments([5], [0], [1])))
    _, states = by_token(given, constants, rounded[0])
    assert relative_error(rounded[1], states[-1]) <= 1e-2


def test_other_numbers_of_values(ops: OpTable) -> None:
    """Full lanes, and more than one vector of them."""
    for values in (16, 24):
        constants = params()
        wide = replace(constants, A=-torch.rand(CHANNELS, values).to(DEVICE))
        given = inputs(3)._replace(b=torch.randn(3, values).to(DEVICE), c=torch.randn(3, values).to(DEVICE))
        pool = copy_pool(padded_pool(2, (CHANNELS, values)))
        want, _ = by_token(given, wide, pool[0])
        assert relative_error(ops.scan_prefill(given, wide, pool, on_device(segments([3], [0], [1]))), want) <= 1e-5

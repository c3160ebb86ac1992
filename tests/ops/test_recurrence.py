"""Chunked and recurrent forms against a per-token recurrence in fp64, and against transformers'."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from forkpoint.ops.parameters import Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.recurrence.reference import recurrence_decode, recurrence_prefill
from tests.ops.recurrence_cases import RecurrenceCase, padded_pool, recurrence_by_token, recurrence_case, rows, segments

SHAPE = Recurrence(2, 4, 16, 24)
MAMBA2 = Recurrence(2, 4, 16, 24, delta=False)
KEYS = Recurrence(2, 2, 24, 16, per_key=True)


def _slice(case: RecurrenceCase, start: int, end: int) -> RecurrenceCase:
    return RecurrenceCase(case.mixed[start:end], case.a[start:end], case.b[start:end], case.params)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 100, 130])
@pytest.mark.parametrize("decay", ["slow", "strong", "none"])
def test_prefill_equals_recurrence(length: int, decay: str) -> None:
    case = recurrence_case(length, SHAPE, decay)
    pool = padded_pool(4, (4, 24, 16))
    source = pool[2].clone()
    out = recurrence_prefill(case.inputs, case.params, pool, segments([length], [2], [0]))
    want, states = recurrence_by_token(case, source)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pool[0].double(), states[-1], atol=2e-5, rtol=1e-4)
    assert torch.equal(pool[2], source)


@pytest.mark.parametrize(
    "shape",
    [
        Recurrence(2, 2, 16, 16),
        Recurrence(1, 3, 8, 16),
        Recurrence(1, 8, 16, 8),
        Recurrence(2, 2, 96, 192, double_beta=True),
        MAMBA2,
        Recurrence(1, 2, 256, 8, delta=False, step_limit=(0.1, 0.4)),
        KEYS,
        Recurrence(2, 2, 16, 8, per_key=True, bound=-5.0),
    ],
)
def test_shapes_and_settings(shape: Recurrence) -> None:
    case = recurrence_case(70, shape, "mixed")
    pool = padded_pool(2, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    out = recurrence_prefill(case.inputs, case.params, pool, segments([70], [-1], [1]))
    want, states = recurrence_by_token(case, torch.zeros_like(pool[0]))
    torch.testing.assert_close(out.double(), want, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(pool[1].double(), states[-1], atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_mamba2_is_transformers() -> None:
    """Its chunked scan, the steps' softplus beyond 20 included."""
    case = recurrence_case(150, MAMBA2, "mixed")
    case.a[:3] = torch.tensor([[19.9], [20.1], [80.0]])
    pool = padded_pool(1, (4, 24, 16))
    q, k, v = (
        x.unflatten(-1, size)[None]
        for x, size in zip(case.mixed.split([32, 32, 96], 1), ((2, 16), (2, 16), (4, 24)), strict=True)
    )
    assert case.params.D is not None
    want, state = mamba2_chunk_scan(
        v,
        case.a[None],
        -case.params.A_log.exp(),
        k,
        q,
        128,
        D=case.params.D,
        dt_bias=case.params.dt_bias,
        dt_softplus=True,
        return_final_states=True,
    )
    got = recurrence_prefill(RecurrenceInputs(case.mixed, case.a, None), case.params, pool, segments([150], [-1], [0]))
    torch.testing.assert_close(got, want[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool, state, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_constant_step_of_one_is_lightning_attention() -> None:
    """MiniMax has a constant step, and the softplus of 0.5413 is 1."""
    config = MiniMaxConfig(hidden_size=48, num_attention_heads=4, head_dim=16, num_local_experts=2, block_size=64)
    theirs = MiniMaxLightningAttention(config, 1).eval()
    q, k, v = F.silu(theirs.qkv_proj(x := torch.randn(1, 100, 48)))[0].view(100, 4, 48).split(16, -1)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    params = RecurrenceParams(
        Recurrence(4, 4, 16, 16, delta=False), theirs.slope_rate.flatten().log(), torch.full((4,), math.log(math.e - 1))
    )
    pool = padded_pool(1, (4, 16, 16))
    out = recurrence_prefill(
        RecurrenceInputs(mixed, torch.zeros(100, 4), None), params, pool, segments([100], [-1], [0])
    )
    got = theirs.out_proj(torch.sigmoid(theirs.output_gate(x[0])) * theirs.norm(out.flatten(1)))
    torch.testing.assert_close(got, theirs(x, None, None)[0][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [SHAPE, MAMBA2])
def test_segments_with_saves_and_sentinels(shape: Recurrence) -> None:
    lens, ends = [130, 1, 200], [0, 130, 131, 331]
    case = recurrence_case(331, shape)
    pool = padded_pool(12, (4, 24, 16))
    before = pool.clone()
    saves = [[(64, 5), (128, 6), (130, 7)], [(1, 8)], [(64, -1), (192, 9)]]
    out = recurrence_prefill(case.inputs, case.params, pool, segments(lens, [3, -1, 4], [3, 1, -1], saves))
    for n, source in enumerate((before[3], torch.zeros_like(before[0]), before[4])):
        want, states = recurrence_by_token(_slice(case, ends[n], ends[n + 1]), source)
        torch.testing.assert_close(out[ends[n] : ends[n + 1]].double(), want, atol=2e-5, rtol=1e-4)
        stored = [(position, slot) for position, slot in saves[n] if slot >= 0] + [(lens[n], [3, 1, -1][n])]
        for position, slot in stored:
            if slot >= 0:
                torch.testing.assert_close(pool[slot].double(), states[position - 1], atol=2e-5, rtol=1e-4)
    for untouched in (0, 2, 4, 10, 11):
        assert torch.equal(pool[untouched], before[untouched])
    assert torch.equal(pool[7], pool[3])


@pytest.mark.parametrize("shape", [SHAPE, MAMBA2])
def test_decode_equals_recurrence(shape: Recurrence) -> None:
    case = recurrence_case(3, shape)
    pool = padded_pool(6, (4, 24, 16))
    before = pool.clone()
    out = recurrence_decode(case.inputs, case.params, pool, rows([2, -1, 4], [2, 0, 5]))
    for row, (source, dst) in enumerate(((before[2], 2), (torch.zeros_like(before[0]), 0), (before[4], 5))):
        want, states = recurrence_by_token(_slice(case, row, row + 1), source)
        torch.testing.assert_close(out[row].double(), want[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[dst].double(), states[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(pool[4], before[4])
    recurrence_decode(RecurrenceInputs(case.mixed[:1], case.a[:1], case.b[:1]), case.params, pool, rows([3], [-1]))
    assert torch.equal(pool[3], before[3])


def test_reading_and_writing_one_slot_gives_the_same_bits() -> None:
    case = recurrence_case(100, SHAPE)
    pool = padded_pool(3, (4, 24, 16))
    source = pool[0].clone()
    apart = recurrence_prefill(case.inputs, case.params, pool, segments([100], [0], [1]))
    same = recurrence_prefill(case.inputs, case.params, pool, segments([100], [0], [0]))
    assert torch.equal(apart, same) and torch.equal(pool[0], pool[1]) and not torch.equal(pool[0], source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, MAMBA2])
def test_cuts_on_the_grid_and_neighbours_leave_the_bits_alone(shape: Recurrence, dtype: torch.dtype) -> None:
    case = recurrence_case(330, shape, dtype=dtype)
    pool = padded_pool(8, (4, 24, 16))
    index = segments([330], [-1], [0], [[(192, 1)]])
    whole = recurrence_prefill(case.inputs, case.params, pool, index)
    recurrence_prefill(
        RecurrenceInputs(case.mixed[:192], case.a[:192], case.b[:192]), case.params, pool, segments([192], [-1], [2])
    )
    assert torch.equal(pool[1], pool[2])
    other = recurrence_case(77, shape, dtype=dtype, seed=1)
    mixed, a, b = (torch.cat((getattr(other, x), getattr(case, x)[192:])) for x in ("mixed", "a", "b"))
    tail = recurrence_prefill(RecurrenceInputs(mixed, a, b), case.params, pool, segments([77, 138], [5, 1], [6, 3]))
    assert torch.equal(tail[77:], whole[192:]) and torch.equal(pool[3], pool[0])


@pytest.mark.parametrize("shape", [SHAPE, MAMBA2])
def test_decode_rows_do_not_see_their_neighbours(shape: Recurrence) -> None:
    case = recurrence_case(9, shape)
    pool = padded_pool(9, (4, 24, 16))
    before = pool.clone()
    order = torch.randperm(9).tolist()
    together = recurrence_decode(
        RecurrenceInputs(case.mixed[order], case.a[order], case.b[order]), case.params, pool, rows(order, order)
    )
    after = pool.clone()
    pool.copy_(before)
    for place, row in enumerate(order):
        one = _slice(case, row, row + 1)
        alone = recurrence_decode(one.inputs, case.params, pool, rows([row], [row]))
        assert torch.equal(alone[0], together[place]) and torch.equal(pool[row], after[row])

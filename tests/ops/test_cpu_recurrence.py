"""The C++ recurrences and convolution, against the torch reference and a per-token oracle in fp64."""

from __future__ import annotations

import pytest
import torch

from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.recurrence_cases import padded_pool, recurrence_by_token, recurrence_case, rows, segments

CPP = cpp()
TORCH = torch_table()
SHAPES = [
    Recurrence(1, 1, 64, 64),
    Recurrence(2, 4, 32, 48),
    Recurrence(1, 3, 128, 128),
    Recurrence(2, 2, 96, 192, double_beta=True),  # OLMo-Hybrid
    Recurrence(1, 8, 16, 16),
    Recurrence(1, 2, 24, 40),
    Recurrence(1, 4, 128, 64, delta=False),  # Mamba-2
    Recurrence(2, 4, 256, 40, delta=False, step_limit=(0.1, 0.4)),
    Recurrence(2, 2, 16, 16, delta=False, step_limit=(1.0, 1.0)),  # lightning attention
    Recurrence(2, 2, 24, 40, per_key=True),
    Recurrence(1, 1, 128, 128, per_key=True, bound=-5.0),  # Ling-3.0
]


def _close(got: torch.Tensor, wanted: torch.Tensor, error: float) -> None:
    assert (got.double() - wanted.double()).abs().max() <= error * (wanted.double().abs().max() + 1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decay", ["slow", "strong", "none"])
def test_prefill_is_the_recurrence(shape: Recurrence, decay: str) -> None:
    length = 150
    case = recurrence_case(length, shape, decay)
    pool = padded_pool(4, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    before = pool.clone()
    out, states = recurrence_by_token(case, pool[1])
    index = segments([length], [1], [2], [[(64, 0), (128, 3)]])
    got = CPP.recurrence_prefill(case.inputs, case.params, pool, index)
    _close(got, out, 1e-5)
    for slot, position in ((2, 150), (0, 64), (3, 128)):
        _close(pool[slot], states[position - 1], 1e-5)
    assert torch.equal(pool[1], before[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decay", ["slow", "strong", "none"])
@pytest.mark.parametrize("length", [17, 64, 150])
def test_rounded_inputs_leave_nearly_exact_states(shape: Recurrence, decay: str, length: int) -> None:
    """A processor that multiplies bf16 in tiles gets fp32 operands in two halves."""
    case = recurrence_case(length, shape, decay, dtype=torch.bfloat16)
    pool = padded_pool(3, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    out, states = recurrence_by_token(case, pool[1])
    got = CPP.recurrence_prefill(case.inputs, case.params, pool, segments([length], [1], [2]))
    _close(got, out, 8e-3)
    _close(pool[2], states[-1], 3e-5)


def test_products_of_torch_are_the_same_after_a_recurrence() -> None:
    """Both use the processor's tiles, and each configures them for itself."""
    case = recurrence_case(128, Recurrence(1, 2, 64, 64), dtype=torch.bfloat16)
    x, weight = torch.randn(96, 160).bfloat16(), torch.randn(200, 160).bfloat16()
    before = torch.nn.functional.linear(x, weight)
    for _ in range(3):
        CPP.recurrence_prefill(case.inputs, case.params, padded_pool(2, (2, 64, 64)), segments([128], [0], [1]))
        assert torch.equal(torch.nn.functional.linear(x, weight), before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_of_nan_leaves_others_as_they_are(shape: Recurrence, dtype: torch.dtype) -> None:
    """It fills all scratch memory, which the next prompt gets as it is. Parts of chunks leave much of it unwritten."""
    size = (shape.num_v_heads, shape.value_dim, shape.key_dim)
    bad = recurrence_case(128, shape, dtype=dtype).inputs
    nan = RecurrenceInputs(*(torch.full_like(each, float("nan")) for each in (bad.mixed, bad.a, bad.b)))
    for length in (1, 5, 17, 40, 70):
        case, pool = recurrence_case(length, shape, dtype=dtype), padded_pool(3, size)
        out, states = recurrence_by_token(case, pool[1])
        CPP.recurrence_prefill(nan, case.params, torch.full_like(pool, float("nan")), segments([128], [0], [0]))
        got = CPP.recurrence_prefill(case.inputs, case.params, pool, segments([length], [1], [2]))
        _close(got, out, 1e-5 if dtype == torch.float32 else 8e-3)
        _close(pool[2], states[-1], 3e-5)


@pytest.mark.parametrize("shape", [Recurrence(1, 3, 32, 64), Recurrence(2, 6, 32, 32, delta=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_nan_leaves_others_as_they_are(shape: Recurrence, dtype: torch.dtype) -> None:
    """Heads that share a key share scratch memory, in which a short chunk leaves rows of the chunk before."""
    size = (shape.num_v_heads, shape.value_dim, shape.key_dim)
    for length in (10, 17, 64, 74, 128):
        case, pool = recurrence_case(length, shape, dtype=dtype), padded_pool(2, size)
        want = CPP.recurrence_prefill(case.inputs, case.params, pool, segments([length], [-1], [0]))
        for bad in range(shape.num_v_heads):
            a = case.a.clone()
            a[:, bad] = torch.nan
            inputs = RecurrenceInputs(case.mixed, a, case.b)
            got = CPP.recurrence_prefill(inputs, case.params, pool, segments([length], [-1], [1]))
            others = [head for head in range(shape.num_v_heads) if head != bad]
            assert torch.equal(got[:, others], want[:, others]) and torch.equal(pool[1, others], pool[0, others])
            assert got[:, bad].isnan().all()


@pytest.mark.parametrize("lens", [[1], [63, 65], [64, 1, 128], [2, 3, 200]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [True, False])
def test_segments_with_sentinels(lens: list[int], dtype: torch.dtype, delta: bool) -> None:
    shape = Recurrence(2, 4, 64, 64, delta=delta)
    case = recurrence_case(sum(lens), shape, dtype=dtype)
    src = [-1, 0, 5][: len(lens)]
    dst = [1, -1, 5][: len(lens)]
    saves = [[(length, 7 + n)] if n != 1 else [(length, -1)] for n, length in enumerate(lens)]
    index = segments(lens, src, dst, saves)
    pool = padded_pool(12, (4, 64, 64))
    other = pool.clone()
    wanted = TORCH.recurrence_prefill(case.inputs, case.params, other, index)
    got = CPP.recurrence_prefill(case.inputs, case.params, pool, index)
    assert got.dtype == dtype
    _close(got, wanted, 1e-5 if dtype == torch.float32 else 8e-3)
    _close(pool, other, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [True, False])
def test_cuts_on_the_grid_and_neighbours_leave_the_bits_alone(dtype: torch.dtype, delta: bool) -> None:
    shape = Recurrence(1, 2, 32, 32, delta=delta)
    case = recurrence_case(330, shape, dtype=dtype)
    args = (case.mixed, case.a, case.b)
    pool = padded_pool(6, (2, 32, 32))
    other = pool.clone()
    index = segments([330], [0], [1], [[(192, 2)]])
    whole = CPP.recurrence_prefill(RecurrenceInputs(*args), case.params, pool, index)
    first = CPP.recurrence_prefill(
        RecurrenceInputs(*(x[:192] for x in args)), case.params, other, segments([192], [0], [3])
    )
    mixed = [torch.cat((x[:70], x[192:])) for x in args]
    second = CPP.recurrence_prefill(RecurrenceInputs(*mixed), case.params, other, segments([70, 138], [-1, 3], [4, 3]))
    assert torch.equal(torch.cat((first, second[70:])), whole)
    assert torch.equal(other[3], pool[1])


@pytest.mark.parametrize("shape", [Recurrence(1, 41, 32, 32, delta=False), Recurrence(2, 10, 32, 32)], ids=str)
def test_heads_that_share_keys_have_the_same_bits_on_any_number_of_threads(shape: Recurrence) -> None:
    case = recurrence_case(100, shape, dtype=torch.bfloat16)
    pool = padded_pool(4, (shape.num_v_heads, 32, 32))
    before, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = CPP.recurrence_prefill(case.inputs, case.params, pool, segments([100], [3], [threads - 1]))
            answers.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, answers[0]) for out in answers)
    assert all(torch.equal(pool[slot], pool[0]) for slot in (1, 2))


def test_steps_of_any_size_are_exact() -> None:
    """The state of a token of ones from zero is its step, softplus(a + dt_bias)."""
    a = torch.tensor([-1e30, -100.0, -87.0, -20.0, -1.0, -1e-3, 0.0, 0.5, 3.0, 19.9, 20.1, 87.0, 90.0, 1e30])
    spec = Recurrence(1, len(a), 16, 16, delta=False)
    zeros = torch.zeros(len(a))
    params = RecurrenceParams(spec, zeros, zeros)
    inputs = RecurrenceInputs(torch.ones(1, spec.mixed_dim), a[None], None)
    wanted = torch.nn.functional.softplus(a.double())
    for run, index in ((CPP.recurrence_prefill, segments([1], [-1], [0])), (CPP.recurrence_decode, rows([-1], [0]))):
        pool = torch.zeros(1, len(a), 16, 16)
        run(inputs, params, pool, index)
        assert torch.allclose(pool[0, :, 0, 0].double(), wanted, rtol=5e-7, atol=1e-37)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_is_the_recurrence(shape: Recurrence) -> None:
    case = recurrence_case(5, shape, "mixed")
    pool = padded_pool(8, (shape.num_v_heads, shape.value_dim, shape.key_dim))
    before = pool.clone()
    src, dst = [0, 3, -1, 4, -1], [0, 5, 6, -1, -1]
    got = CPP.recurrence_decode(case.inputs, case.params, pool, rows(src, dst))
    for row in range(5):
        one = type(case)(case.mixed[row : row + 1], case.a[row : row + 1], case.b[row : row + 1], case.params)
        state = before[src[row]] if src[row] >= 0 else torch.zeros_like(before[0])
        out, states = recurrence_by_token(one, state)
        _close(got[row], out[0], 1e-5)
        if dst[row] >= 0:
            _close(pool[dst[row]], states[0], 1e-6)
    for slot in (1, 2, 3, 4, 7):
        assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_in_place_and_alone_gives_the_same_bits(dtype: torch.dtype) -> None:
    shape = Recurrence(2, 4, 128, 128)
    case = recurrence_case(6, shape, dtype=dtype)
    pool = padded_pool(12, (4, 128, 128))
    other = pool.clone()
    args = (case.mixed, case.a, case.b)
    apart = CPP.recurrence_decode(RecurrenceInputs(*args), case.params, pool, rows(list(range(6)), list(range(6, 12))))
    for row in range(6):
        one = [x[row : row + 1] for x in args]
        got = CPP.recurrence_decode(RecurrenceInputs(*one), case.params, other, rows([row], [row]))
        assert torch.equal(got[0], apart[row])
        assert torch.equal(other[row], pool[row + 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_conv_prefill_follows_the_reference(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lens = [1, 2, 3, 65, 100]
    x = torch.randn(sum(lens), 2 * 70).to(dtype)[:, 30:130]
    weight, bias = torch.randn(100, width).to(dtype), torch.randn(100).to(dtype)
    saves = [[], [(2, 10)], [(3, 11)], [(64, 12), (65, 13)], [(64, -1), (100, 14)]]
    index = segments(lens, [-1, 1, 2, -1, 4], [0, 1, 5, -1, 4], saves)
    pool = padded_pool(16, (width - 1, 100), dtype)
    other = pool.clone()
    wanted = TORCH.conv_prefill(x, ConvTaps(weight, bias, True), other, index)
    got = CPP.conv_prefill(x, ConvTaps(weight, bias, True), pool, index)
    _close(got, wanted, 1e-6 if dtype == torch.float32 else 8e-3)
    assert torch.equal(pool, other)


def test_conv_update_continues_a_prefill_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 50).bfloat16(), torch.randn(50, 4).bfloat16()
    pool = padded_pool(4, (3, 50), torch.bfloat16)
    whole = CPP.conv_prefill(x, ConvTaps(weight, None, True), pool, segments([9], [-1], [0]))
    steps = []
    for t in range(9):
        src = t % 2 + 1 if t else -1
        steps.append(CPP.conv_update(x[t : t + 1], ConvTaps(weight, None, True), pool, rows([src], [(t + 1) % 2 + 1])))
    assert torch.equal(torch.cat(steps), whole)
    assert torch.equal(pool[9 % 2 + 1], pool[0])
    twin = pool[1].clone()
    CPP.conv_update(x[:2], ConvTaps(weight, None, False), pool, rows([1, -1], [1, -1]))
    assert torch.equal(pool[1], torch.cat((twin[1:], x[:1])))

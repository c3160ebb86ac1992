"""The Triton recurrences against torch's fp32 reference and the per-token recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.ops import launch_table
from forkpoint.ops.parameters import Recurrence, RecurrenceInputs
from forkpoint.ops.select import torch_table
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.recurrence_cases import RecurrenceCase, padded_pool, recurrence_by_token, recurrence_case, rows, segments
from tests.ops.triton_cases import (
    DEVICE,
    ON_GPU,
    behind,
    copy_pool,
    gpu_only,
    on_device,
    padded,
    params_on_device,
    relative_error,
    sized,
    triton_ops,
)

OURS, TORCH = triton_ops(), torch_table()
SMALL = Recurrence(1, 2, 16, 24)
MAMBA2 = Recurrence(1, 2, 16, 24, delta=False)
FALCON = Recurrence(1, 1, 256, 24, delta=False, step_limit=(0.1, 0.4))
STEADY: dict[str, Any] = {"delta": False, "step_limit": (1.0, 1.0)}
LIGHTNING = Recurrence(2, 2, 16, 16, **STEADY)
KEYS = Recurrence(2, 2, 16, 24, per_key=True)
BOUNDED = Recurrence(1, 1, 24, 16, per_key=True, bound=-5.0)
OLMO = Recurrence(1, 1, 96, 192, double_beta=True)
# The interpreter cuts bfloat16 off instead of rounding it.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 1.2e-2 if ON_GPU else 2.5e-2}


def moved(case: RecurrenceCase) -> RecurrenceCase:
    return RecurrenceCase(*(x.to(DEVICE) for x in (case.mixed, case.a, case.b)), params_on_device(case.params))


def pool_for(shape: Recurrence) -> Tensor:
    return copy_pool(padded_pool(8, (shape.num_v_heads, shape.value_dim, shape.key_dim), torch.float32))


def compare_prefill(
    case: RecurrenceCase, lens: list[int], src: list[int], dst: list[int], saves: list[list[tuple[int, int]]]
) -> None:
    case, pool = moved(case), pool_for(case.params.spec)
    want_pool, index = copy_pool(pool), on_device(segments(lens, src, dst, saves))
    wide = RecurrenceCase(case.mixed.float(), case.a.float(), case.b.float(), case.params)
    want = TORCH.recurrence_prefill(wide.inputs, case.params, want_pool, index)
    got = OURS.recurrence_prefill(case.inputs, case.params, pool, index)
    bound = BOUND[case.mixed.dtype]
    assert got.dtype == case.mixed.dtype
    assert relative_error(got, want) <= bound
    written = {slot for listed in saves for _, slot in listed if slot >= 0} | {slot for slot in dst if slot >= 0}
    for slot in range(len(pool)):
        if slot in written:
            assert relative_error(pool[slot], want_pool[slot]) <= bound
        else:
            assert torch.equal(pool[slot], want_pool[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        (SMALL, "slow"),
        (SMALL, "strong"),
        (SMALL, "none"),
        (MAMBA2, "slow"),
        (MAMBA2, "strong"),
        (KEYS, "slow"),
        (KEYS, "strong"),
    ],
)
def test_segments_saves_and_sentinels(shape: Recurrence, decay: str, dtype: torch.dtype) -> None:
    lens, saves = [1, 70, 130], [[(1, 6)], [(64, -1), (70, 5)], [(64, 4), (128, 7)]]
    if dtype == torch.bfloat16:
        lens, saves = [65], [[(64, 5)]]
    src, dst = [-1, 3, 2][: len(lens)], [0, 3, -1][: len(lens)]
    compare_prefill(recurrence_case(sum(lens), shape, decay, dtype), lens, src, dst, saves)


@pytest.mark.parametrize(
    "shape",
    sized(
        [OLMO, Recurrence(1, 3, 8, 16), FALCON, BOUNDED, LIGHTNING],
        [Recurrence(2, 16, 64, 64), Recurrence(3, 3, 96, 192, True), FALCON, Recurrence(32, 32, 128, 128, **STEADY)],
    ),
)
def test_shapes(shape: Recurrence) -> None:
    compare_prefill(recurrence_case(66, shape, "mixed"), [66], [1], [2], [[(64, 0)]])


@pytest.mark.parametrize("shape", [SMALL, KEYS], ids=str)
def test_segments_in_parts_are_those_of_one_launch(shape: Recurrence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose launches have few programs runs segments in parts."""
    case, pool = moved(recurrence_case(140, shape, "slow")), pool_for(shape)
    other = copy_pool(pool)
    index = on_device(segments([5, 70, 65], [1, -1, 2], [0, 3, -1], [[], [(64, 4)], [(65, 5)]]))
    whole = OURS.recurrence_prefill(case.inputs, case.params, pool, index)
    monkeypatch.setattr(launch_table, "traits_of", lambda device: DeviceTraits(most_programs=4))
    parts = OURS.recurrence_prefill(case.inputs, case.params, other, index)
    assert torch.equal(whole, parts) and torch.equal(pool, other)


@gpu_only
@pytest.mark.parametrize("decay", ["slow", "strong", "none", "mixed"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Recurrence(16, 16, 128, 128), torch.bfloat16),
        (Recurrence(16, 32, 128, 128), torch.bfloat16),
        (Recurrence(16, 32, 128, 128), torch.float32),
        (Recurrence(16, 48, 128, 128), torch.bfloat16),
        (Recurrence(16, 64, 128, 128), torch.bfloat16),
        (Recurrence(30, 30, 96, 192, True), torch.bfloat16),
        (Recurrence(30, 30, 96, 192, True), torch.float32),
        (Recurrence(8, 64, 128, 64, delta=False), torch.bfloat16),  # Nemotron-3-Nano
        (Recurrence(32, 32, 128, 128, per_key=True), torch.bfloat16),  # Kimi-Linear
        (Recurrence(32, 32, 128, 128, per_key=True), torch.float32),
        (Recurrence(1, 48, 256, 64, delta=False), torch.bfloat16),  # Falcon-H1
        (Recurrence(1, 48, 256, 64, delta=False), torch.float32),
    ],
)
def test_full_prefill(shape: Recurrence, decay: str, dtype: torch.dtype) -> None:
    lens = [1000, 64, 1, 63, 65, 777]
    saves: list[list[tuple[int, int]]] = [[(64, 5), (960, 6)], [(64, 7)], [], [], [], []]
    compare_prefill(
        recurrence_case(sum(lens), shape, decay, dtype), lens, [1, -1, -1, 2, 2, 3], [0, 4, -1, -1, -1, 3], saves
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    sized(
        [SMALL, OLMO, MAMBA2, FALCON, KEYS, BOUNDED],
        [Recurrence(16, 32, 128, 128), Recurrence(16, 64, 128, 128), Recurrence(30, 30, 96, 192, True), MAMBA2, FALCON],
    ),
)
def test_decode(shape: Recurrence, dtype: torch.dtype) -> None:
    case = moved(recurrence_case(4, shape, "mixed", dtype))
    pool = pool_for(shape)
    want_pool, index = copy_pool(pool), on_device(rows([2, -1, 4, 6], [2, 0, 5, -1]))
    want = TORCH.recurrence_decode(case.inputs, case.params, want_pool, index)
    got = OURS.recurrence_decode(case.inputs, case.params, pool, index)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(got, want, **tolerance)
    torch.testing.assert_close(pool, want_pool, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(pool[slot], want_pool[slot]) for slot in (1, 3, 4, 6, 7))


@pytest.mark.parametrize("shape", sized([SMALL, MAMBA2], [Recurrence(4, 8, 128, 128), MAMBA2]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_neighbours_and_slots_leave_the_bits_alone(shape: Recurrence, dtype: torch.dtype) -> None:
    length = 130
    case = moved(recurrence_case(length, shape, dtype=dtype))
    pool = pool_for(shape)
    whole = OURS.recurrence_prefill(
        case.inputs, case.params, pool, on_device(segments([length], [0], [1], [[(64, 2), (130, 3)]]))
    )
    assert torch.equal(pool[1], pool[3])
    other = moved(recurrence_case(5, shape, dtype=dtype, seed=1))
    mixed, a, b = (torch.cat((getattr(other, x), getattr(case, x)[64:])) for x in ("mixed", "a", "b"))
    tail = OURS.recurrence_prefill(
        RecurrenceInputs(mixed, a, b), case.params, pool, on_device(segments([5, 66], [4, 2], [5, 2]))
    )
    assert torch.equal(tail[5:], whole[64:]) and torch.equal(pool[2], pool[1])


def test_padding_is_harmless() -> None:
    case, pool = moved(recurrence_case(70, SMALL)), pool_for(SMALL)
    want_pool, params = copy_pool(pool), case.params
    index = on_device(segments([3, 67], [1, -1], [1, 2], [[(3, 5)], [(64, 4)]]))
    wide = [behind(x, 130) for x in (case.mixed, case.a, case.b)]
    expected = OURS.recurrence_prefill(case.inputs, params, want_pool, index)
    got = OURS.recurrence_prefill(RecurrenceInputs(*wide), params, pool, padded(index))
    assert torch.equal(got[:70], expected) and torch.equal(pool, want_pool)
    few = [x[:2] for x in (case.mixed, case.a, case.b)]
    expected = OURS.recurrence_decode(RecurrenceInputs(*few), params, want_pool, on_device(rows([1, 4], [1, 3])))
    wide = [behind(x, 2) for x in few]
    got = OURS.recurrence_decode(RecurrenceInputs(*wide), params, pool, on_device(rows([1, 4, -1, -1], [1, 3, -1, -1])))
    assert torch.equal(got[:2], expected) and torch.equal(pool, want_pool)


@pytest.mark.parametrize("shape", sized([SMALL], [Recurrence(16, 32, 128, 128), Recurrence(30, 30, 96, 192, True)]))
def test_few_and_many_segments_give_the_same_bits(shape: Recurrence) -> None:
    """They are scanned in different tiles. In a recorded step, only the device knows which are right."""
    length, others = (1000, 11) if ON_GPU else (66, 4)
    case, pool = moved(recurrence_case(length, shape, "mixed", torch.bfloat16)), pool_for(shape)
    own = on_device(segments([length], [0], [1], [[(64, 2)]]))
    recorded_pool = copy_pool(pool)
    alone = OURS.recurrence_prefill(case.inputs, case.params, pool, own)
    recorded = OURS.recurrence_prefill(case.inputs, case.params, recorded_pool, padded(padded(own)))
    assert torch.equal(recorded, alone) and torch.equal(recorded_pool, pool)
    more = moved(recurrence_case(others, shape, dtype=torch.bfloat16, seed=1))
    wide = [torch.cat((getattr(more, x), getattr(case, x))) for x in ("mixed", "a", "b")]
    index = on_device(
        segments([1] * others + [length], [-1] * others + [0], [-1] * others + [3], [[]] * others + [[(64, 4)]])
    )
    recorded_pool = copy_pool(pool)
    together = OURS.recurrence_prefill(RecurrenceInputs(*wide), case.params, pool, index)[others:]
    recorded = OURS.recurrence_prefill(RecurrenceInputs(*wide), case.params, recorded_pool, padded(index))[others:]
    assert torch.equal(recorded, together) and torch.equal(recorded_pool, pool)
    if ON_GPU:
        assert torch.equal(together, alone) and torch.equal(pool[3:5], pool[1:3])
    assert relative_error(together, alone) <= 1e-2 and relative_error(pool[3:5], pool[1:3]) <= 1e-2


@pytest.mark.parametrize("count", [1, 3, 5])
def test_recorded_segments_are_scanned_once(count: int) -> None:
    """They overwrite the states that they start from, so a second scan would start from other states."""
    lens, slots = [66, *range(2, count + 1)], list(range(count))
    case, pool = moved(recurrence_case(sum(lens), SMALL, dtype=torch.bfloat16)), pool_for(SMALL)
    index, recorded_pool = on_device(segments(lens, slots, slots)), copy_pool(pool)
    launched = OURS.recurrence_prefill(case.inputs, case.params, pool, index)
    recorded = OURS.recurrence_prefill(case.inputs, case.params, recorded_pool, padded(padded(index)))
    assert torch.equal(recorded, launched) and torch.equal(recorded_pool, pool)


def test_prefill_equals_the_recurrence() -> None:
    case, pool = recurrence_case(67, SMALL, "slow"), pool_for(SMALL)
    want, states = recurrence_by_token(case, pool[1].cpu())
    case = moved(case)
    got = OURS.recurrence_prefill(case.inputs, case.params, pool, on_device(segments([67], [1], [0])))
    assert relative_error(got, want) <= 5e-5 and relative_error(pool[0], states[-1]) <= 5e-5


def test_equal_keys_do_not_blow_up() -> None:
    """The inverse of a chunk whose keys are all one, with no decay and beta near 1."""
    case = moved(recurrence_case(64, SMALL, "none"))
    case.mixed[:, SMALL.key_dim : 2 * SMALL.key_dim] = case.mixed[:1, SMALL.key_dim : 2 * SMALL.key_dim].clone()
    pool, index = pool_for(SMALL), on_device(segments([64], [-1], [0]))
    want_pool = copy_pool(pool)
    want = TORCH.recurrence_prefill(RecurrenceInputs(case.mixed, case.a, case.b + 6), case.params, want_pool, index)
    got = OURS.recurrence_prefill(RecurrenceInputs(case.mixed, case.a, case.b + 6), case.params, pool, index)
    assert relative_error(got, want) <= 1e-4 and relative_error(pool[0], want_pool[0]) <= 1e-4

"""The attention kernel with groups of warps, run on the host as on a Hopper GPU, against a plain softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention import kernel, prefill_warps_kernel
from forkpoint.ops.attention.kernel import TritonPagedAttention
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.gluon_host import HostKernel, on_host
from tests.ops.test_triton_attention import Batch, Heads, padded
from tests.ops.triton_cases import ON_GPU, relative_error

pytestmark = pytest.mark.skipif(ON_GPU, reason="test_triton_attention.py runs the kernel itself on a Hopper GPU")
BOUND = 4e-3
JOINED_BOUND = 8e-3  # of answers that the interpreter joined, which truncates them to bfloat16
OURS = TritonPagedAttention(True)


@pytest.fixture(params=[0, 1])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernel]:
    """The kernel on a Hopper GPU, where copies land and partitions take turns in an order drawn from a seed."""
    monkeypatch.setattr(kernel, "traits_of", lambda device: DeviceTraits(num_processors=1, has_warpgroups=True))
    with on_host(prefill_warps_kernel, "prefill_warps_kernel", request.param) as kernel_on_host:
        yield kernel_on_host


def attend(
    batch: Batch,
    rows: slice = slice(None),
    index: AttentionIndex | None = None,
    operator: TritonPagedAttention = OURS,
) -> Tensor:
    return operator(batch.q[rows], batch.k_cache, batch.v_cache, index or batch.index, 0.2, None, batch.gate[rows])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [Heads(8, 2, 128, 128), Heads(6, 2, 256, 256), Heads(5, 1, 128, 128)])
def test_against_plain_softmax(heads: Heads, deterministic: bool, launched: HostKernel) -> None:
    """Rows of one query and of several tiles, of one key and of several tiles, with NaN after the last."""
    batch = Batch([1, 333, 70, 513, 64], [1, 130, 1, 3, 64], 0, heads, torch.bfloat16)
    want = sigmoid_mul(batch.plain(None).flatten(1), batch.gate)
    assert relative_error(attend(batch, operator=TritonPagedAttention(deterministic)).flatten(1), want) <= BOUND
    assert launched.num_programs


@pytest.mark.parametrize(("heads", "splits"), [(Heads(4, 2, 128, 128), 7), (Heads(3, 1, 256, 256), 2)])
def test_programs_share_keys(heads: Heads, splits: int, launched: HostKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode row, and rows with several shares of keys, of which some are empty. The last share of a row has one key,
    which only the last query sees."""
    monkeypatch.setattr(kernel, "num_splits", lambda programs, at_once, places: splits)
    one = 8 * (16384 // heads.dim) + 1
    batch, operator = Batch([70, one, one + 90], [1, 3, 65], 1, heads, torch.bfloat16), TritonPagedAttention(False)
    got = attend(batch, operator=operator)
    assert launched.num_programs == 3 * splits * 2  # for each tile two key heads, or two parts of its queries
    want = sigmoid_mul(batch.plain(None).flatten(1), batch.gate)
    assert relative_error(got.flatten(1), want) <= JOINED_BOUND
    assert torch.equal(got, attend(batch, index=padded(batch.index, 0), operator=operator))
    monkeypatch.setattr(kernel, "_takes_warps", lambda call: False)
    assert relative_error(attend(batch, operator=operator), got.double()) <= JOINED_BOUND


def test_a_row_shares_keys_alike_in_any_batch(launched: HostKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row's tiles and sums leave the bits alone, if the number of splits is the same."""
    monkeypatch.setattr(kernel, "num_splits", lambda programs, at_once, places: 3)
    lens, queries, operator = [1300, 900], [10, 70], TritonPagedAttention(False)
    batch = Batch(lens, queries, 0, Heads(4, 2, 128, 128), torch.bfloat16)
    want = attend(batch, operator=operator)
    for row, rows in enumerate((slice(0, 10), slice(10, 80))):
        index = batch.index_of([row], [queries[row]], [lens[row]], 0)
        assert torch.equal(attend(batch, rows, index, operator), want[rows])


@pytest.mark.parametrize("deterministic", [False, True])
def test_few_programs_split_keys(deterministic: bool, launched: HostKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = DeviceTraits(num_processors=8, has_warpgroups=True)
    monkeypatch.setattr(kernel, "traits_of", lambda device: traits)
    batch = Batch([300], [100], 0, Heads(4, 2, 128, 128), torch.bfloat16)
    attend(batch, operator=TritonPagedAttention(deterministic))
    assert launched.num_programs == (4 if deterministic else 8)


def test_padding_changes_no_bits(launched: HostKernel) -> None:
    batch = Batch([300, 190], [20, 9], 0, Heads(4, 2, 128, 128), torch.bfloat16)
    assert torch.equal(attend(batch), attend(batch, index=padded(batch.index, 0)))


def test_cuts_on_the_grid_leave_the_bits_alone(launched: HostKernel) -> None:
    batch = Batch([400], [400], 0, Heads(8, 2, 128, 128), torch.bfloat16)
    want = attend(batch)
    for start, end in ((0, 64), (64, 200), (128, 400)):
        got = attend(batch, slice(start, end), batch.index_of([0], [end - start], [end], 0))
        assert torch.equal(got, want[start:end])


@pytest.mark.parametrize(
    ("heads", "window", "block"),
    [(Heads(2, 2, 128, 128), None, 64), (Heads(4, 2, 128, 128), 70, 64), (Heads(4, 2, 128, 128), None, 32)],
)
def test_other_calls_use_the_portable_kernel(
    heads: Heads, window: int | None, block: int, launched: HostKernel
) -> None:
    batch = Batch([70], [9], 0, heads, torch.bfloat16, block)
    got = OURS(batch.q, batch.k_cache, batch.v_cache, batch.index, 0.2, window)
    assert relative_error(got, batch.plain(window)) <= 8e-3 and not launched.num_programs

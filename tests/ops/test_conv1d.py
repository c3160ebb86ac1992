"""The short convolution against torch's conv1d over the whole history."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.conv1d.reference import conv_prefill, conv_update
from forkpoint.ops.parameters import ConvTaps
from tests.ops.recurrence_cases import padded_pool, rows, segments

DIM = 20


def history_conv(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    inputs = torch.cat((window, x)).t().unsqueeze(0)
    out = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])[0].t()
    return F.silu(out) if silu else out


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_segments(width: int, silu: bool, with_bias: bool) -> None:
    torch.manual_seed(0)
    lens = [1, 2, 3, 4, 63, 64, 65, 130]
    x = torch.randn(sum(lens), 2 * DIM)[:, :DIM]
    weight, bias = torch.randn(DIM, width), torch.randn(DIM) if with_bias else None
    pool = padded_pool(24, (width - 1, DIM))
    before = pool.clone()
    src, dst = [0, 1, -1, 3, 4, -1, 6, 7], [0, 11, 2, 13, -1, 5, 16, 7]
    saves: list[list[tuple[int, int]]] = [[] for _ in lens]
    saves[1], saves[6], saves[7] = [(2, 17)], [(64, 18), (65, 19)], [(64, 20), (128, -1)]
    out = conv_prefill(x, ConvTaps(weight, bias, silu), pool, segments(lens, src, dst, saves))
    start = 0
    for n, length in enumerate(lens):
        window = before[src[n]] if src[n] >= 0 else torch.zeros_like(before[0])
        part = x[start : start + length]
        torch.testing.assert_close(
            out[start : start + length], history_conv(window, part, weight, bias, silu), atol=1e-5, rtol=1e-5
        )
        inputs = torch.cat((window, part))
        for position, slot in [*saves[n], (length, dst[n])]:
            if slot >= 0:
                assert torch.equal(pool[slot], inputs[position : position + width - 1])
        start += length
    for untouched in (1, 3, 4, 6, 8, 9, 10, 12, 14, 15, 21, 22, 23):
        assert torch.equal(pool[untouched], before[untouched])


def test_update_continues_a_segment() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(12, DIM), torch.randn(DIM, 4)
    pool = padded_pool(6, (3, DIM))
    want = conv_prefill(x, ConvTaps(weight, None, True), pool, segments([12], [-1], [5]))
    conv_prefill(x[:5], ConvTaps(weight, None, True), pool, segments([5], [-1], [0]))
    source = pool[0].clone()
    other = torch.randn(DIM)
    for t in range(5, 12):
        slots = ([0, -1], [1, 3]) if t == 5 else ([1, 3], [1, 3])
        got = conv_update(torch.stack((x[t], other)), ConvTaps(weight, None, True), pool, rows(*slots))
        assert torch.equal(got[0], want[t])
    assert torch.equal(pool[1], pool[5]) and torch.equal(pool[0], source)


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, DIM).bfloat16(), torch.randn(DIM, 4).bfloat16()
    pool = padded_pool(2, (3, DIM), torch.bfloat16)
    got = conv_prefill(x, ConvTaps(weight, None, True), pool, segments([70], [-1], [0]))
    exact = history_conv(torch.zeros(3, DIM), x.float(), weight.float(), None, True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact.bfloat16().float(), atol=1e-6, rtol=2**-7)

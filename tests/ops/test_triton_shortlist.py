"""The copy of an output head in four bits, from which drafts get their ids."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.ops.sampling import shortlist_kernel
from forkpoint.ops.sampling.shortlist_kernel import TILE, UNIT, Shortlist, e4m3_of, shortlist
from forkpoint.platforms.platform import DeviceTraits
from forkpoint.platforms.table import traits_of
from tests.ops.triton_cases import DEVICE, ON_GPU, gpu_only, sized, triton_ops

triton_ops()  # which prepares the interpreter
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FEW = 2 * TILE.value + 40


def head(num_ids: int, width: int, padding: int = 0) -> Tensor:
    """Rows of about the same length; what is behind the ids is larger by far."""
    weight = torch.randn(num_ids + padding, width) * 0.02
    weight[num_ids:] *= 50
    return weight.to(DEVICE, torch.bfloat16)


@triton.jit
def halves_kernel(codes, low, high, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    code = tl.load(codes + at)
    tl.store(low + at, e4m3_of(code, False, BITS).to(tl.uint8, bitcast=True))
    tl.store(high + at, e4m3_of(code, True, BITS).to(tl.uint8, bitcast=True))


def test_both_halves_of_a_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    low, high = torch.zeros_like(codes), torch.zeros_like(codes)
    halves_kernel[(1,)](codes, low, high, BITS=traits_of(DEVICE).multiplies_fp8, num_warps=1)
    for found, half in ((low, codes % 16), (high, codes // 16)):
        values = found.cpu().view(torch.float8_e4m3fn).float() * 64
        assert torch.equal(values, E2M1[half.cpu().long()])


@pytest.mark.parametrize("num_rows", sized([1, 17, 70], [16, 32, 33, 64, 128, 129, 500, 600]))
@pytest.mark.parametrize("width", sized([UNIT], [3 * UNIT, 2048, 4096]))
def test_ids_that_are_likelier_than_others_are_found(num_rows: int, width: int) -> None:
    """And their logits are those of the head, not of the copy."""
    weight, wanted = head(FEW, width, padding=24), torch.randint(0, FEW, (num_rows,))
    hidden = (weight[wanted.to(DEVICE)].float() * 50 + torch.randn(num_rows, width).to(DEVICE) * 0.3).bfloat16()
    hidden[:1] *= 1e-3  # only its direction counts
    ids, logits = Shortlist(weight, FEW)(hidden)
    exact = hidden.double() @ weight[:FEW].double().T
    assert ids.tolist() == exact.argmax(1).tolist() == wanted.tolist()
    assert torch.allclose(logits.double(), exact.amax(1), rtol=1e-5)


def test_which_id_of_equals() -> None:
    """In one tile, over tiles, and of all: the lowest, as of the head."""
    weight = head(FEW, UNIT)
    weight[[7, 9, 200]] = weight[20] * 2
    weight[[130, 140]] = weight[21] * 2
    hidden = torch.stack([weight[20], weight[21], torch.zeros_like(weight[0])])
    assert Shortlist(weight, FEW)(hidden)[0].tolist() == [7, 130, 0]


def test_logits_that_are_all_negative() -> None:
    """What is behind the ids has larger ones."""
    direction = torch.randn(UNIT)
    weight = -direction * (0.1 + 0.1 * torch.rand(FEW + 24, 1)) + 0.01 * torch.randn(FEW + 24, UNIT)
    weight[FEW:] *= -1
    weight = weight.to(DEVICE, torch.bfloat16)
    hidden = direction.to(DEVICE, torch.bfloat16)[None]
    ids, logits = Shortlist(weight, FEW)(hidden)
    exact = (hidden.double() @ weight[:FEW].double().T)[0]
    assert logits[0] < 0 and exact[ids[0]] > exact.quantile(0.9)


def test_the_copy_has_the_nearest_numbers() -> None:
    """The copy has four bits and a scale for each row. Its columns are in the order of a byte's halves."""
    weight = head(FEW, 2 * UNIT, padding=24)
    named = Shortlist(weight, FEW)
    codes, scales = named._codes[:FEW].cpu().long(), named._scales[:FEW].cpu() / 64
    copied = E2M1[torch.cat([codes % 16, codes // 16], dim=1)]
    sized = weight[:FEW].cpu().float() / scales[:, None]
    assert torch.equal(sized.abs().amax(1).round(), torch.full((FEW,), 6.0))
    nearest = (sized[:, :, None] - E2M1).abs().amin(2)
    torch.testing.assert_close((sized - copied).abs(), nearest, atol=1e-6, rtol=0)
    assert not named._codes[FEW:].any()


def test_few_ids_and_none() -> None:
    weight, hidden = head(4, UNIT, padding=60), torch.randn(3, UNIT).to(DEVICE, torch.bfloat16)
    ids, logits = Shortlist(weight, 4)(hidden)
    exact = hidden.float() @ weight[:4].float().T
    assert ((ids >= 0) & (ids < 4)).all() and torch.allclose(logits, exact.gather(1, ids[:, None])[:, 0], rtol=1e-4)
    ids, logits = Shortlist(weight, 0)(hidden)
    assert ids.tolist() == [0, 0, 0] and logits.tolist() == [-math.inf] * 3
    ids, _ = Shortlist(weight, 4)(hidden[:0])
    assert ids.shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_is_no_number_finds_an_id_all_the_same(value: float) -> None:
    hidden = torch.full((2, UNIT), value).to(DEVICE, torch.bfloat16)
    ids, _ = Shortlist(head(FEW, UNIT, padding=24), FEW)(hidden)
    assert ((ids >= 0) & (ids < FEW)).all()
    weight = head(FEW, UNIT)
    weight[5] = value
    ids, _ = Shortlist(weight, FEW)(torch.randn(2, UNIT).to(DEVICE, torch.bfloat16))
    assert ((ids >= 0) & (ids < FEW)).all()


def test_nearly_all_ids_are_those_of_the_head_where_logits_lie_close_together() -> None:
    """The states are random. The copy alone would find few of the ids."""
    torch.manual_seed(0)
    num_ids = 248_320 if ON_GPU else 4 * 16 * TILE.value
    weight, hidden = head(num_ids, UNIT), torch.randn(128, UNIT).to(DEVICE, torch.bfloat16)
    ids, _ = Shortlist(weight, num_ids)(hidden)
    right = (ids == (hidden.float() @ weight.float().T).argmax(1)).float().mean()
    assert right > (0.9 if ON_GPU else 0.97)  # of four candidates 0.94


def test_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = head(FEW, UNIT)
    for multiplies in (True, False):
        traits = DeviceTraits(multiplies_fp8=multiplies)
        monkeypatch.setattr(shortlist_kernel, "traits_of", lambda device, traits=traits: traits)
        assert (shortlist(weight, FEW) is not None) == multiplies
        assert shortlist(weight.float(), FEW) is None and shortlist(weight[:, :128], FEW) is None


@gpu_only
def test_a_graph_replays_it() -> None:
    weight, hidden = head(FEW, UNIT), torch.zeros(8, UNIT, dtype=torch.bfloat16, device=DEVICE)
    named = Shortlist(weight, FEW)
    named(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = named(hidden)
    hidden.copy_(weight[40:48])
    graph.replay()
    assert ids.tolist() == list(range(40, 48))

"""Norms, gates and rotary embedding against torch's own, and that an element's bits do not depend on its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from forkpoint.ops.activation.reference import sigmoid, sigmoid_mul, silu, silu_mul, softplus
from forkpoint.ops.norm.reference import add_rmsnorm, gated_rmsnorm, mix_residuals, rmsnorm
from forkpoint.ops.rope.reference import rope
from forkpoint.ops.select import select_table, torch_table
from forkpoint.ops.table import OpTable

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("ours", "torchs"), [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)])
def test_activations(ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat((torch.randn(1000) * 10, torch.tensor([-100.0, -30.0, 0.0, 19.9, 20.1, 100.0])))
    torch.testing.assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_bits_do_not_depend_on_the_place(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(40000) * 5
    want = function(x)
    for start, end in ((0, 1), (1, 4), (3, 40), (39, 101), (7, 39993)):
        assert torch.equal(function(x[start:end].clone()), want[start:end])
        assert torch.equal(function(x[start:end]), want[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    x = torch.randn(7, 20).to(dtype)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(silu_mul(x), F.silu(x[:, :10]) * x[:, 10:], **tolerance)
    torch.testing.assert_close(sigmoid_mul(x, x.flip(0)), x * torch.sigmoid(x.flip(0)), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 40), (1, 2, 8)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gate, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1])
    want = F.rms_norm(x.float(), shape[-1:], weight, 1e-5)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5).float(), want, **tolerance)
    torch.testing.assert_close(gated_rmsnorm(x, gate, weight, 1e-5).float(), want * F.silu(gate.float()), **tolerance)
    got = gated_rmsnorm(x, gate, weight, 1e-5, sigmoid=True).float()
    torch.testing.assert_close(got, want * torch.sigmoid(gate.float()), **tolerance)
    normed, total = add_rmsnorm(x, gate, weight, 1e-5)
    assert torch.equal(total, x + gate)
    assert torch.equal(normed, rmsnorm(total, weight, 1e-5))


@pytest.mark.parametrize("ops", [torch_table(), select_table("auto", False, False)], ids=["torch", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_residuals_are_attention_over_normed_keys(dtype: torch.dtype, ops: OpTable) -> None:
    bank, current, weight = torch.randn(4, 3, 40).to(dtype), torch.randn(3, 40).to(dtype), torch.randn(40)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    for done, last in ((bank[:1], None), (bank[:1], current), (bank[:3], None), (bank[:3], current)):
        values = torch.cat((done, last[None]) if last is not None else (done,)).transpose(0, 1).double()
        query = weight.double().expand(3, 1, 40)
        want = F.scaled_dot_product_attention(query, F.rms_norm(values, (40,), None, 1e-5), values, scale=1.0)[:, 0]
        torch.testing.assert_close(ops.mix_residuals(done, last, weight, 1e-5).double(), want, **tolerance)


def test_bits_of_mixed_residuals_do_not_depend_on_the_batch() -> None:
    done, current, weight = torch.randn(3, 100, 48), torch.randn(100, 48), torch.randn(48)
    for last in (None, current):
        want = mix_residuals(done, last, weight, 1e-5)
        for count in (1, 15, 31, 47, 61):
            rows = slice(3, 3 + count)
            got = mix_residuals(done[:, rows], None if last is None else last[rows], weight, 1e-5)
            assert torch.equal(got, want[rows]), f"{count} rows"


def test_mamba2_norms_groups_after_the_gate() -> None:
    theirs = Zamba2RMSNormGated(48, group_size=24, eps=1e-5)
    theirs.weight.data.uniform_(0.5, 1.5)
    x, gate = torch.randn(5, 48), 3 * torch.randn(5, 48)
    groups = [part.unflatten(-1, (2, 24)) for part in (x, gate)]
    got = gated_rmsnorm(*groups, theirs.weight.detach().view(2, 24), 1e-5, gate_first=True)
    torch.testing.assert_close(got.flatten(1), theirs(x, gate))


def test_norm_rows_do_not_see_their_neighbours() -> None:
    wide = torch.randn(130, 3 * 72)
    x, weight = wide[:, 72:144].unflatten(1, (3, 24)), torch.randn(24)
    whole = rmsnorm(x, weight, 1e-6)
    for start, end in ((0, 1), (5, 7), (64, 130)):
        assert torch.equal(rmsnorm(x[start:end], weight, 1e-6), whole[start:end])
        assert torch.equal(rmsnorm(x[start:end].clone(), weight, 1e-6), whole[start:end])


@pytest.mark.parametrize("rotary_dim", [4, 10, 16])
def test_rope_is_a_rotation_by_position(rotary_dim: int) -> None:
    angles = torch.rand(50, rotary_dim // 2) * 6
    positions = torch.tensor([3, 0, 49])
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    got_q, got_k = rope(q, k, torch.cat((angles.cos(), angles.sin()), -1), positions)
    half = rotary_dim // 2
    for x, got in ((q, got_q), (k, got_k)):
        turned = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.polar(
            torch.ones(3, 1, half), angles[positions].unsqueeze(1)
        )
        want = torch.cat((turned.real, turned.imag, x[..., rotary_dim:]), -1)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

"""C++ linear and experts: against fp64 products, and rows that do not depend on the batch, bit for bit."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp

CPP = cpp()
TORCH = torch_table()
# Of the result's scale. fp32: one chain of K roundings; bf16: the output's own rounding, half of 2^-8.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 32), (37, 100), (65, 768), (5, 1), (512, 130), (600, 1100)])
@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 14, 33, 64, 171, 300])
def test_linear_is_the_product(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k = shape
    x, w, bias = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    exact = x.double() @ w.double().T + bias.double()
    got = CPP.linear(x, CPP.prepare_linear(w, bias))
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    sizes = torch.randn(300, 1).mul(8).exp2()
    x = torch.randn(400, 420).to(dtype)
    for scale in (1.0, 1e-35):  # products of the latter fall below the least normal number
        packed = CPP.prepare_linear(
            (torch.randn(300, 420) * sizes * scale).to(dtype), torch.randn(300).to(dtype) * scale
        )
        whole = CPP.linear(x, packed)
        for count in (1, 2, 3, 5, 12, 13, 17, 40, 169, 337):
            order = torch.randperm(400)[:count]
            assert torch.equal(CPP.linear(x[order], packed), whole[order]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 100), (128, 768), (192, 33), (80, 64)])  # those of 80 are not whole panels
@pytest.mark.parametrize("with_bias", [True, False])
def test_gated_products_have_the_bits_of_plain_ones(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    n, k = shape
    packed = CPP.prepare_linear(torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if with_bias else None)
    for rows in (1, 2, 3, 17, 33, 300, 1300):
        x = torch.randn(rows, k).to(dtype)
        assert torch.equal(CPP.linear_silu_mul(x, packed), CPP.silu_mul(CPP.linear(x, packed))), rows
    with pytest.raises(RuntimeError, match=f"takes K={k}"):
        CPP.linear_silu_mul(torch.randn(300, k + 1).to(dtype), packed)


@pytest.mark.parametrize("columns", [768, 777, 1536])  # outputs of 2 MiB are stored past the caches
def test_rows_of_a_large_product_have_the_bits_of_their_own(columns: int) -> None:
    torch.manual_seed(5)
    for bias in (torch.randn(columns).bfloat16(), None):
        packed = CPP.prepare_linear(torch.randn(columns, 256).bfloat16(), bias)
        x = torch.randn(2003, 300).bfloat16()[:, 20:276]
        whole, order = CPP.linear(x, packed), torch.randperm(2003)[:20]
        assert torch.equal(CPP.linear(x[order], packed), whole[order])
        if columns % 64 == 0:
            assert torch.equal(CPP.linear_silu_mul(x[order], packed), CPP.linear_silu_mul(x, packed)[order])


def test_large_tensors_are_in_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system lends no huge pages")
    kept = torch.ones(16 << 20)
    assert "hg" in _kernel_flags(kept.data_ptr())  # whether pages are free is up to the machine
    assert kept.data_ptr() % (2 << 20) == 0
    with pytest.raises(RuntimeError, match="can't allocate memory for a tensor of"):
        torch.empty(1 << 55)


def _kernel_flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds `address`: `hg` asks for huge pages (proc_pid_smaps(5))."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no flags of {address:#x}")


def test_threads_do_not_change_the_bits() -> None:
    packed = CPP.prepare_linear(torch.randn(300, 400).bfloat16(), None)
    x = torch.randn(70, 400).bfloat16()
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(torch.cat((CPP.linear(x, packed), CPP.linear(x[:3], packed))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [70, 96])
def test_strided_input(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(9, 200).to(dtype)[:, 30 : 30 + width]
    packed = CPP.prepare_linear(torch.randn(40, width).to(dtype), None)
    assert torch.equal(CPP.linear(x, packed), CPP.linear(x.contiguous(), packed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    for bias in (None, torch.randn(40).to(dtype)):
        packed = CPP.prepare_linear(torch.randn(40, 70).to(dtype), bias)
        assert CPP.linear(torch.empty(0, 70, dtype=dtype), packed).shape == (0, 40)


def test_only_rows_of_x_are_read() -> None:
    """A page that must not be read follows x. A product that reads it ends the process."""
    page, width, protect = mmap.PAGESIZE, 64, ctypes.CDLL(None).mprotect
    memory = mmap.mmap(-1, 4 * page)
    last = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 3 * page
    assert protect(ctypes.c_void_p(last), ctypes.c_size_t(page), 0) == 0
    packed = CPP.prepare_linear(torch.randn(40, width).bfloat16(), None)
    for rows in (1, 2, 3, 13, 17, 31, 33, 49):
        x = torch.frombuffer(memory, dtype=torch.bfloat16, count=rows * width, offset=3 * page - 2 * rows * width)
        x.copy_(torch.randn(rows * width))
        x = x.view(rows, width)
        assert torch.equal(CPP.linear(x, packed), CPP.linear(x.clone(), packed))


def test_denormal_numbers_stay_elsewhere() -> None:
    """Products in matrix tiles take them for zero, and restore what the thread did with them."""
    packed = CPP.prepare_linear(torch.randn(2048, 64).bfloat16(), None)
    for rows in (1, 2, 3, 33):
        CPP.linear(torch.randn(rows, 64).bfloat16(), packed)
        assert torch.full((2**17,), 1e-40).mul(2).gt(0).all()


def test_wrong_width_is_refused() -> None:
    with pytest.raises(RuntimeError, match="takes K=16"):
        CPP.linear(torch.randn(2, 8), CPP.prepare_linear(torch.randn(4, 16), None))


def _routing(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.rand(tokens, experts).softmax(-1).topk(top_k, dim=-1)
    return weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_experts_follow_the_reference(tokens: int, gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gate_up, down = torch.randn(6, 80 if gated else 40, 48).to(dtype) * 0.2, torch.randn(6, 48, 40).to(dtype) * 0.2
    x = torch.randn(tokens, 48).to(dtype)
    weights, ids = _routing(tokens, 6, 3)
    error = 2e-6 if dtype == torch.float32 else 2e-2  # bf16: two intermediate roundings
    for limits in (None, GateLimits(0.5, 0.3)) if gated else (None,):
        wanted = TORCH.experts(x, TORCH.prepare_experts(gate_up, down), weights, ids, limits)
        got = CPP.experts(x, CPP.prepare_experts(gate_up, down), weights, ids, limits=limits)
        assert (got - wanted).abs().max() <= error * wanted.abs().max()


def test_experts_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    packed = CPP.prepare_experts(torch.randn(5, 64, 32).bfloat16(), torch.randn(5, 32, 32).bfloat16())
    x = torch.randn(300, 32).bfloat16()
    weights, ids = _routing(300, 5, 2)
    whole = CPP.experts(x, packed, weights, ids)
    for count in (1, 13, 170):
        some = torch.randperm(300)[:count]
        assert torch.equal(CPP.experts(x[some], packed, weights[some], ids[some]), whole[some])


def test_an_unknown_expert_is_refused() -> None:
    packed = CPP.prepare_experts(torch.randn(2, 8, 4), torch.randn(2, 4, 4))
    with pytest.raises(IndexError, match="expert 2 of 2"):
        CPP.experts(torch.randn(1, 4), packed, torch.ones(1, 1), torch.tensor([[2]]))

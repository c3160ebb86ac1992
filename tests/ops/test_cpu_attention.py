"""C++ paged attention and the row-local operators, against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention.reference import kv_write
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp, cpp_module
from tests.ops.plain_attention import plain_attention
from tests.ops.recurrence_cases import GATED_NORMS, ints

CPP, TILES = cpp(tiles=False), cpp(tiles=True)
TORCH = torch_table()
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def _close(got: Tensor, wanted: Tensor, error: float) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert (got.double() - wanted.double()).abs().max() <= error * wanted.double().abs().max()


def _caches(blocks: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Strided views of one buffer, as in the arena; NaN where nothing was stored."""
    k_size, v_size = heads * 64 * dim, heads * 64 * value_dim
    arena = torch.full((blocks, k_size + v_size + 48), float("nan"), dtype=dtype)
    k = arena[:, 16 : 16 + k_size].view(blocks, heads, 64, dim)
    return k, arena[:, 16 + k_size : 16 + k_size + v_size].view(blocks, heads, 64, value_dim)


class _Rows:
    """Rows of random tokens, stored in shuffled blocks; `q` holds the last `queries` of each."""

    def __init__(
        self,
        lens: list[int],
        queries: list[int],
        decodes: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(0)
        hq, hkv = heads
        counts = [-(-n // 64) for n in lens]
        order = torch.randperm(sum(counts)).tolist()
        table = torch.full((len(lens), max(counts) + 1), -1, dtype=torch.int32)
        slots = []
        for row, count in enumerate(counts):
            table[row, :count] = ints(order[:count])
            slots += [order[t // 64] * 64 + t % 64 for t in range(lens[row])]
            order = order[count:]
        self.k, self.v = torch.randn(sum(lens), hkv, dims[0]).to(dtype), torch.randn(sum(lens), hkv, dims[1]).to(dtype)
        self.k_cache, self.v_cache = _caches(sum(counts), hkv, *dims, dtype)
        kv_write(self.k, self.v, self.k_cache, self.v_cache, torch.tensor(slots))
        self.q = torch.randn(sum(queries), hq, dims[0]).to(dtype)
        self.lens, self.queries = lens, queries
        order = torch.randperm(len(lens))  # the table's lines stand in another order than the rows
        self.index = attention_index(
            queries, lens, table[order], torch.empty(0, dtype=torch.int64), decodes, order.argsort().tolist()
        )

    def exact(self, scale: float, window: int | None) -> Tensor:
        """fp64, row by row, without blocks."""
        keys, values = (torch.split(x, self.lens) for x in (self.k, self.v))
        return plain_attention(self.q, self.queries, keys, values, scale, window)

    def run(self, scale: float, window: int | None) -> Tensor:
        return CPP.paged_attention(self.q, self.k_cache, self.v_cache, self.index, scale, window)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_torch_attends_with_many_queries_in_tiles(heads: tuple[int, int], gated: bool) -> None:
    """Decode rows, short and long prompts next to each other, with and without earlier keys."""
    lens, queries = [70, 1, 40, 200, 500, 129, 30, 300], [1, 1, 40, 200, 130, 129, 5, 128]
    rows = _Rows(lens, queries, 2, heads, (64, 64), torch.bfloat16)
    gate = torch.randn(sum(queries), heads[0] * 64).bfloat16() if gated else None
    caches = rows.k_cache, rows.v_cache
    got = TILES.paged_attention(rows.q, *caches, rows.index, 0.2, None, gate)
    exact = rows.exact(0.2, None)
    _close(got, (exact if gate is None else sigmoid_mul(exact, gate.view(exact.shape).double())).bfloat16(), 8e-3)
    padded = torch.cat([rows.q, rows.q[:3]])
    if gate is None:
        assert torch.equal(TILES.paged_attention(padded, *caches, rows.index, 0.2, None)[:-3], got)
    for window, index in ((50, rows.index), (None, replace(rows.index, query_lens=(), host_kv_lens=()))):
        own = TILES.paged_attention(rows.q, *caches, index, 0.2, window)
        assert torch.equal(own, CPP.paged_attention(rows.q, *caches, index, 0.2, window)), "ours alone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 50, 600])
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((6, 2), (128, 128)), ((4, 4), (64, 64)), ((2, 1), (256, 256)), ((5, 1), (80, 24)), ((10, 1), (32, 32))],
    ids=str,
)
def test_attention_is_softmax(
    heads: tuple[int, int], dims: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    case = _Rows([1, 700, 64, 1, 65, 300], [1, 1, 1, 1, 65, 131], 3, heads, dims, dtype)
    got = case.run(0.1, window)
    _close(got, case.exact(0.1, window).to(dtype), 3e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_rows_and_cuts_do_not_change_the_bits(window: int | None, dtype: torch.dtype) -> None:
    case = _Rows([400, 600, 520], [400, 1, 200], 0, (6, 2), (64, 64), dtype)
    whole = case.run(0.2, window)
    i = case.index
    for start in (64, 192, 384):
        for rows in ([0], [0, 2]):
            lens = [400, 520]
            queries = [400 - start, 200]
            count = len(rows)
            index = attention_index(
                queries[:count], lens[:count], i.block_table, i.key_places, 0, i.table_rows[rows].tolist()
            )
            q = torch.cat([case.q[start:400], *([case.q[401:]] if 2 in rows else [])])
            part = CPP.paged_attention(q, case.k_cache, case.v_cache, index, 0.2, window)
            assert torch.equal(part[: 400 - start], whole[start:400]), (start, rows)
            if 2 in rows:
                assert torch.equal(part[400 - start :], whole[401:])


def test_decode_rows_do_not_see_their_neighbours() -> None:
    case = _Rows([1300, 600, 40], [1, 1, 1], 3, (6, 2), (64, 64), torch.bfloat16)
    whole, i = case.run(0.2, None), case.index
    for row in range(3):
        lens, line = [int(i.kv_lens[row])], [int(i.table_rows[row])]
        one = attention_index([1], lens, i.block_table, i.key_places, 1, line)
        got = CPP.paged_attention(case.q[row : row + 1], case.k_cache, case.v_cache, one, 0.2, None)
        assert torch.equal(got[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [768, 128, 96, 20])
def test_norms_follow_the_reference(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, size).to(dtype), torch.rand(size) + 0.5
    residual = torch.randn(37, size).to(dtype)
    _close(CPP.rmsnorm(x, weight, 1e-6), TORCH.rmsnorm(x, weight, 1e-6), 2 * ROUNDING[dtype])
    heads = torch.randn(9, 5 * size + 7).to(dtype)[:, : 3 * size].unflatten(1, (3, size))
    _close(CPP.rmsnorm(heads, weight, 1e-6), TORCH.rmsnorm(heads, weight, 1e-6), 2 * ROUNDING[dtype])
    gate = torch.randn(9, 3, size).to(dtype)
    for form in GATED_NORMS:
        args = (heads, 3 * gate, weight if not form[0] else torch.rand(3, size) + 0.5, 1e-6, *form)
        _close(CPP.gated_rmsnorm(*args), TORCH.gated_rmsnorm(*args), 2 * ROUNDING[dtype])
    normed, total = TORCH.add_rmsnorm(x, residual.clone(), weight, 1e-6)
    got_normed, got_total = CPP.add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(got_total, total)
    _close(got_normed, normed, 2 * ROUNDING[dtype])
    assert torch.equal(CPP.rmsnorm(x[5:6], weight, 1e-6)[0], CPP.rmsnorm(x, weight, 1e-6)[5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_follow_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(11, 2 * 77) * 20).to(dtype)
    _close(CPP.silu_mul(x), TORCH.silu_mul(x), 2 * ROUNDING[dtype])
    left, right = x[:, :77], x[:, 77:]
    for gate in (right, right[:, :1]):
        _close(cpp_module().sigmoid_mul(left, gate), sigmoid_mul(left, gate), 2 * ROUNDING[dtype])


def test_gates_at_the_ends_of_the_range() -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")]])
    got = cpp_module().sigmoid_mul(torch.ones_like(x), x)[0]
    assert got[:2].tolist() == pytest.approx([0.0, 0.0], abs=1e-38)
    assert got[3:7].tolist() == [0.5, 1.0, 1.0, 1.0]
    assert bool(got[7].isnan())


def test_state_copy_follows_the_reference() -> None:
    pools = [torch.randn(6, 100)[:, 10:90].view(6, 2, 40), torch.randn(6, 3, 5).bfloat16()]
    others = [pool.clone() for pool in pools]
    src, dst = ints([0, -1, 2, 4]), ints([1, 3, -1, 4])
    CPP.state_copy(pools, src, dst)
    TORCH.state_copy(others, src, dst)
    for pool, other in zip(pools, others, strict=True):
        assert torch.equal(pool, other)

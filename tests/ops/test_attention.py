"""Paged attention against a plain softmax over each row's own keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.attention.reference import kv_write, paged_attention
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.select import torch_table
from tests.ops.cpu_table import cpp
from tests.ops.plain_attention import plain_attention

FIXED = torch_table(True).paged_attention
BLOCK, HEADS, KV_HEADS, DIM, VALUE_DIM = 64, 6, 2, 16, 24
Attention = Callable[[Tensor, Tensor, Tensor, AttentionIndex, float, int | None], Tensor]


def cache(num_blocks: int, dim: int, dtype: torch.dtype) -> Tensor:
    size = KV_HEADS * BLOCK * dim
    return torch.full((num_blocks, size + 40), float("nan"), dtype=dtype)[:, 8 : 8 + size].view(
        num_blocks, KV_HEADS, BLOCK, dim
    )


class Batch:
    """Rows of random keys and values in scattered blocks; row r's last `queries[r]` tokens ask."""

    def __init__(self, kv_lens: list[int], queries: list[int], num_decodes: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        widths = [-(-n // BLOCK) for n in kv_lens]
        order = torch.randperm(sum(widths) + 3).tolist()
        table = [[order.pop() for _ in range(width)] for width in widths]
        self.k_cache, self.v_cache = cache(sum(widths) + 3, DIM, dtype), cache(sum(widths) + 3, VALUE_DIM, dtype)
        self.k = [torch.randn(n, KV_HEADS, DIM).to(dtype) for n in kv_lens]
        self.v = [torch.randn(n, KV_HEADS, VALUE_DIM).to(dtype) for n in kv_lens]
        self.q = torch.randn(sum(queries), HEADS, DIM).to(dtype)
        slots = [table[r][p // BLOCK] * BLOCK + p % BLOCK for r, n in enumerate(kv_lens) for p in range(n)]
        kv_write(torch.cat(self.k), torch.cat(self.v), self.k_cache, self.v_cache, torch.tensor(slots))
        padded = [row + [0] * (max(widths) - len(row)) for row in table]
        lines = torch.randperm(len(padded))  # the table's lines stand in another order than the rows
        self.index = attention_index(
            queries,
            kv_lens,
            torch.tensor(padded, dtype=torch.int32)[lines],
            torch.tensor([], dtype=torch.int64),
            num_decodes,
            lines.argsort().tolist(),
        )

    def plain(self, scale: float, window: int | None, first_key: int = 0) -> Tensor:
        return plain_attention(self.q, self.index.query_lens, self.k, self.v, scale, window, first_key)


@pytest.mark.parametrize("attend", [paged_attention, FIXED], ids=["plain", "fixed"])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_softmax(attend: Attention, window: int | None, dtype: torch.dtype) -> None:
    batch = Batch([1, 64, 130, 700, 65, 100, 3, 128], [1, 1, 1, 650, 1, 37, 3, 64], 3, dtype)
    got = attend(batch.q, batch.k_cache, batch.v_cache, batch.index, 0.3, window)
    assert got.dtype == dtype
    tolerance = {"atol": 3e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(got.double(), batch.plain(0.3, window), **tolerance)


@pytest.mark.parametrize("attend", [paged_attention, FIXED, cpp().paged_attention], ids=["plain", "fixed", "cpp"])
def test_keys_before_the_first_are_not_seen(attend: Attention) -> None:
    lens = [2, 64, 65, 130, 1100]  # the last in several parts
    batch = Batch(lens, [1] * len(lens), len(lens), torch.float32)
    index = replace(batch.index, first_key=1)
    got = attend(batch.q, batch.k_cache, batch.v_cache, index, 0.3, None)
    torch.testing.assert_close(got.double(), batch.plain(0.3, None, 1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_tiles_do_not_see_the_chunking(dtype: torch.dtype) -> None:
    whole = Batch([300], [300], 0, dtype)
    want = FIXED(whole.q, whole.k_cache, whole.v_cache, whole.index, 0.25, None)
    for start, end in ((0, 64), (64, 192), (256, 300), (128, 300)):
        index = attention_index([end - start], [end], whole.index.block_table, whole.index.key_places)
        got = FIXED(whole.q[start:end], whole.k_cache, whole.v_cache, index, 0.25, None)
        assert torch.equal(got, want[start:end])


def test_write_skips_absent_tokens() -> None:
    k_cache, v_cache = cache(2, DIM, torch.float32), cache(2, VALUE_DIM, torch.float32)
    k, v = torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, VALUE_DIM)
    kv_write(k, v, k_cache, v_cache, torch.tensor([70, -1, 2]))
    assert torch.equal(k_cache[1, :, 6], k[0]) and torch.equal(v_cache[0, :, 2], v[2])
    assert int(k_cache.isfinite().sum()) == 2 * KV_HEADS * DIM


@pytest.mark.parametrize("attend", [paged_attention, FIXED], ids=["plain", "fixed"])
def test_lengths_are_read_where_the_host_has_no_copy(attend: Attention) -> None:
    batch = Batch([1, 64, 130, 100], [1, 1, 1, 37], 3, torch.float32)
    away = replace(batch.index, query_lens=(), host_kv_lens=())
    want = attend(batch.q, batch.k_cache, batch.v_cache, batch.index, 0.3, None)
    assert torch.equal(attend(batch.q, batch.k_cache, batch.v_cache, away, 0.3, None), want)

"""Triton paged attention against a plain softmax over each row's own keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forkpoint.ops.metadata import AttentionIndex
from tests.ops.gdn_cases import ints
from tests.ops.triton_cases import DEVICE, on_device, relative_error, sized, triton_ops

OURS = triton_ops()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int
    value_dim: int


class Batch:
    """Rows of random keys and values in scattered blocks; row r's last `queries[r]` tokens ask."""

    def __init__(self, kv_lens: list[int], queries: list[int], decodes: int, heads: Heads, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.heads = heads
        widths = [-(-n // 64) for n in kv_lens]
        order = torch.randperm(sum(widths) + 3).tolist()
        table = [[order.pop() for _ in range(width)] for width in widths]
        # NaN where nothing was stored, and behind each block.
        self.k_cache, self.v_cache = (self._cache(sum(widths) + 3, d, dtype) for d in (heads.dim, heads.value_dim))
        self.k = [torch.randn(n, heads.keys, heads.dim).to(DEVICE, dtype) for n in kv_lens]
        self.v = [torch.randn(n, heads.keys, heads.value_dim).to(DEVICE, dtype) for n in kv_lens]
        self.q = torch.randn(sum(queries), heads.queries, heads.dim).to(DEVICE, dtype)
        for row, length in enumerate(kv_lens):
            for i, block in enumerate(table[row]):
                part = slice(64 * i, min(64 * i + 64, length))
                count = part.stop - part.start
                self.k_cache[block, :, :count] = self.k[row][part].transpose(0, 1)
                self.v_cache[block, :, :count] = self.v[row][part].transpose(0, 1)
        padded = [row + [0] * (max(widths) - len(row)) for row in table]
        self.index = on_device(
            AttentionIndex(
                decodes,
                ints([0, *torch.tensor(queries).cumsum(0).tolist()]),
                ints(kv_lens),
                torch.tensor(padded, dtype=torch.int32),
                torch.tensor([], dtype=torch.int64),
                tuple(queries),
                tuple(kv_lens),
            )
        )

    def _cache(self, blocks: int, dim: int, dtype: torch.dtype) -> Tensor:
        size = self.heads.keys * 64 * dim
        wide = torch.full((blocks, size + 48), float("nan"), dtype=dtype, device=DEVICE)
        return wide[:, 16 : 16 + size].view(blocks, self.heads.keys, 64, dim)

    def run(self, window: int | None, index: AttentionIndex | None = None, q: Tensor | None = None) -> Tensor:
        q = self.q if q is None else q
        return OURS.paged_attention(q, self.k_cache, self.v_cache, index or self.index, 0.2, window)

    def plain(self, window: int | None) -> Tensor:
        outputs, start, group = [], 0, self.heads.queries // self.heads.keys
        for r, count in enumerate(self.index.query_lens):
            length = self.index.host_kv_lens[r]
            q = self.q[start : start + count].double()
            k, v = (x[r].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
            at = torch.arange(length - count, length, device=DEVICE).unsqueeze(1)
            keys = torch.arange(length, device=DEVICE)
            hidden = (keys > at) | (keys <= at - (window or length + 1))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += count
        return torch.cat(outputs)


SMALL = Heads(4, 2, 16, 24)
SHAPES = sized(
    [SMALL, Heads(3, 1, 40, 40)],
    [Heads(16, 4, 256, 256), Heads(32, 8, 128, 128), Heads(8, 8, 64, 64), Heads(6, 1, 96, 96), Heads(14, 2, 192, 128)],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads", SHAPES)
def test_against_plain_softmax(heads: Heads, window: int | None, dtype: torch.dtype) -> None:
    batch = Batch([1, 64, 330, 100, 3, 130], [1, 1, 1, 37, 3, 130], 3, heads, dtype)
    got = batch.run(window)
    assert got.dtype == dtype and relative_error(got, batch.plain(window)) <= BOUND[dtype]


@pytest.mark.parametrize("heads", sized([SMALL], [Heads(16, 4, 256, 256), Heads(8, 8, 128, 128)]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_on_the_grid_leave_the_bits_alone(heads: Heads, dtype: torch.dtype) -> None:
    whole = Batch([200], [200], 0, heads, dtype)
    want = whole.run(None)
    table = whole.index.block_table
    for start, end in ((0, 64), (64, 200), (128, 200)):
        lens = (torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([end], dtype=torch.int32))
        index = on_device(
            AttentionIndex(0, *lens, table, whole.index.slot_mapping, (end - start,), (end,))  # type: ignore[arg-type]
        )
        assert torch.equal(whole.run(None, index, whole.q[start:end]), want[start:end])


def test_decode_rows_do_not_see_their_neighbours() -> None:
    batch = Batch([5, 600, 64], [1, 1, 1], 3, SMALL, torch.float32)
    want, i = batch.run(None), batch.index
    alone = AttentionIndex(1, i.cu_queries[:2], i.kv_lens[:1], i.block_table[:1], i.slot_mapping, (1,), (5,))
    assert torch.equal(batch.run(None, alone, batch.q[:1]), want[:1])

"""Choosing pools of keys by their index keys and attending to them, against loops over single queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.attention import pool_attention_kernel
from forkpoint.ops.attention.reference import in_fp8
from forkpoint.ops.metadata import AttentionIndex, AttentionWork
from forkpoint.ops.parameters import KVScales, PoolRule
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from tests.ops.cpu_table import cpp
from tests.ops.triton_cases import DEVICE, on_device, triton_ops

RULE, HEADS, DIM, BLOCK = PoolRule(4, 5), 3, 8, 64
KV_HEADS, KEY_DIM = 2, 6


TABLES: dict[str, Callable[[], OpTable]] = {"free": torch_table, "fixed": lambda: torch_table(True), "cpp": cpp}


@pytest.fixture(scope="module", params=TABLES)
def ops(request: pytest.FixtureRequest) -> OpTable:
    return TABLES[request.param]()


class Sequence:
    """A sequence of 200 tokens in scattered blocks, NaN behind its last key.

    Index queries and keys are small integers, so that many scores are equal.
    """

    def __init__(self, num_tokens: int = 200) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        self.num_tokens, self.blocks = num_tokens, [3, 0, 5, 2][: -(-num_tokens // BLOCK)]
        self.queries, self.weights = integers(num_tokens, HEADS, DIM), integers(num_tokens, HEADS)
        self.keys = integers(num_tokens // RULE.size, DIM)
        self.q = torch.randn(num_tokens, 2 * KV_HEADS, KEY_DIM, generator=generator)
        self.kv = torch.randn(2, num_tokens, KV_HEADS, KEY_DIM, generator=generator)
        pools = torch.full((6 * BLOCK // RULE.size, DIM), torch.nan)
        own = torch.cat([torch.arange(16) + 16 * block for block in self.blocks])
        pools[own[: len(self.keys)]] = self.keys
        self.index = pools.view(6, 1, BLOCK, DIM // RULE.size)
        self.caches = torch.full((2, 6, KV_HEADS, BLOCK, KEY_DIM), torch.nan)
        for at in range(num_tokens):
            self.caches[:, self.blocks[at // BLOCK], :, at % BLOCK] = self.kv[:, at]

    def wanted(self, at: int) -> tuple[list[int], Tensor]:
        """The pools that the token at a position chooses, and the attention to them."""
        scores = [
            sum(float(w * (q @ key).relu()) for w, q in zip(self.weights[at], self.queries[at], strict=True))
            for key in self.keys[: (at + 1) // RULE.size]
        ]
        best = sorted(range(len(scores)), key=lambda pool: (-scores[pool], pool))[: RULE.most]
        tail = range((at + 1) // RULE.size * RULE.size, at + 1)
        seen = [at for pool in sorted(best) for at in range(pool * RULE.size, (pool + 1) * RULE.size)] + [*tail]
        k, v = (x[seen].repeat_interleave(2, dim=1) for x in self.kv)
        shares = torch.softmax(torch.einsum("hd,shd->hs", self.q[at], k) * 0.3, dim=1)
        return sorted(best), torch.einsum("hs,shd->hd", shares, v)

    def run(self, ops: OpTable, index: AttentionIndex, at: slice) -> tuple[Tensor, Tensor]:
        chosen = ops.choose_pools(self.queries[at], self.weights[at], self.index, index, RULE)
        return chosen, ops.pool_attention(self.q[at], *self.caches, index, 0.3, chosen, RULE)

    def part(self, ops: OpTable, first: int, last: int, decodes: bool = False) -> tuple[Tensor, Tensor]:
        """Run the tokens from `first` to `last` as one prefill segment, or each as a decode row."""
        table, none = torch.tensor([self.blocks], dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        lens, ends = ([1] * (last - first), list(range(first + 1, last + 1))) if decodes else ([last - first], [last])
        index = attention_index(lens, ends, table, none, len(lens) * decodes, [0] * len(lens))
        return self.run(ops, index, slice(first, last))


def test_choices_and_attention(ops: OpTable) -> None:
    sequence = Sequence()
    wanted = [sequence.wanted(at) for at in range(sequence.num_tokens)]
    for decodes in (False, True):
        chosen, out = sequence.part(ops, 0, sequence.num_tokens, decodes)
        assert [[pool for pool in row if pool >= 0] for row in chosen.tolist()] == [pools for pools, _ in wanted]
        assert bool((chosen[:, 1:] >= chosen[:, :-1])[chosen[:, 1:] >= 0].all())
        torch.testing.assert_close(out, torch.stack([found for _, found in wanted]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("table", ["fixed", "cpp"])
def test_bits_depend_neither_on_chunks_nor_on_other_rows(table: str) -> None:
    fixed, sequence = TABLES[table](), Sequence()
    whole = sequence.part(fixed, 0, 200)
    for cuts in ([0, 64, 128, 192, 200], [0, 128, 200], [0, 192, 200]):
        parts = [sequence.part(fixed, *cut) for cut in pairwise(cuts)]
        assert all(torch.equal(torch.cat(own), want) for own, want in zip(zip(*parts, strict=True), whole, strict=True))
    together = sequence.part(fixed, 100, 140, decodes=True)
    alone = [sequence.part(fixed, at, at + 1, decodes=True) for at in range(100, 140)]
    assert all(torch.equal(torch.cat(own), want) for own, want in zip(zip(*alone, strict=True), together, strict=True))


def mixed_batch(sequence: Sequence, tokens: list[int], first: int) -> tuple[AttentionIndex, Tensor]:
    """Decode rows at the positions `tokens`, one that is padding, and a segment from `first` on with a padded tile.

    Also returns the positions of the queries, and 0 for padding.
    """
    count, num_tokens = len(tokens), sequence.num_tokens
    table, none = torch.tensor([sequence.blocks], dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    lens, ends = [1] * (count + 1) + [num_tokens - first], [*(at + 1 for at in tokens), 0, num_tokens]
    index = attention_index(lens, ends, table, none, count + 1, [0] * len(lens))
    assert index.work is not None
    work = replace(index.work, tiles=F.pad(index.work.tiles, (0, 0, 0, 1), value=-1))
    at = torch.tensor([*tokens, 0, *range(first, num_tokens)])
    return replace(index, query_lens=(), host_kv_lens=(), work=work), at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_choose_and_attend_as_torch_does(deterministic: bool, dtype: torch.dtype) -> None:
    """Also where one tensor has keys and values, as latents do. Few integers make most scores equal."""
    ours = replace(triton_ops(), pool_attention=pool_attention_kernel.TritonPoolAttention(deterministic))
    sequence, torch_ops = Sequence(), torch_table()
    index, at = mixed_batch(sequence, [0, 3, 18, 22, 23, 24, 130, 198, 199], 182)
    here = torch.arange(len(at)) != 9
    queries, caches = sequence.queries[at].to(dtype), sequence.caches.to(DEVICE, dtype)
    q, gate = sequence.q[at].to(DEVICE, dtype), torch.randn(len(at), 4 * KEY_DIM).to(DEVICE, dtype)
    on_card = on_device(index)
    assert index.work is not None
    on_card = replace(on_card, work=AttentionWork(*(x.to(DEVICE) for x in work_tensors(index.work))))
    given = (queries.to(DEVICE), sequence.weights[at].to(DEVICE), sequence.index.to(DEVICE, dtype), on_card, RULE)
    chosen = ours.choose_pools(*given)
    wanted = [sequence.wanted(position)[0] for position in at.tolist()]
    got = [[pool for pool in row if pool >= 0] for row in chosen.tolist()]
    assert [own for own, i in zip(got, here, strict=True) if i] == [
        own for own, i in zip(wanted, here, strict=True) if i
    ]
    whole = replace(on_card, query_lens=(*[1] * 10, 18), host_kv_lens=tuple(index.kv_lens.tolist()))
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for values, own_gate in ((caches[1], gate), (caches[0], None)):
        found = ours.pool_attention(q, caches[0], values, on_card, 0.3, chosen, RULE, own_gate)
        want = torch_ops.pool_attention(q, caches[0], values, whole, 0.3, chosen, RULE, own_gate)
        torch.testing.assert_close(found[here], want[here], **tolerance)


def work_tensors(work: AttentionWork) -> tuple[Tensor, Tensor, Tensor]:
    return work.tiles, work.parts, work.part_ptr


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("table", ["free", "cpp", "triton"])
def test_attention_to_keys_in_8_bits(table: str, shared: bool) -> None:
    """The result is that of the widened keys. Keys that are shared are values too."""
    ours, device = (triton_ops(), DEVICE) if table == "triton" else (TABLES[table](), torch.device("cpu"))
    sequence, tokens = Sequence(), [3, 24, 199]
    lens, ends = [1] * len(tokens) + [10], [*(at + 1 for at in tokens), 200]
    blocks, none = torch.tensor([sequence.blocks], dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    at = torch.tensor([*tokens, *range(190, 200)])

    def attend(ops: OpTable, where: torch.device, caches: list[Tensor], scales: KVScales | None) -> Tensor:
        index = attention_index(lens, ends, blocks.to(where), none.to(where), len(tokens), [0] * len(lens))
        first, second = caches[0], caches[0 if shared else 1]
        q, picked = sequence.q[at].to(where), chosen.to(where)
        return ops.pool_attention(q, first, second, index, 0.3, picked, RULE, scales=scales).cpu()

    host = attention_index(lens, ends, blocks, none, len(tokens), [0] * len(lens))
    chosen = torch_table().choose_pools(sequence.queries[at], sequence.weights[at], sequence.index, host, RULE)
    kept = [in_fp8(cache.transpose(1, 2).flatten(0, 1)) for cache in sequence.caches]
    codes, scales = (
        [x.view(6, BLOCK, KV_HEADS, -1).transpose(1, 2).contiguous() for x in own] for own in zip(*kept, strict=True)
    )
    wide = [code.float() * scale for code, scale in zip(codes, scales, strict=True)]
    both = [scales[0], scales[0 if shared else 1]]
    narrow = attend(ours, device, [x.to(device) for x in codes], KVScales(*(x.to(device) for x in both)))
    torch.testing.assert_close(narrow, attend(torch_table(), torch.device("cpu"), wide, None), atol=1e-5, rtol=1e-5)

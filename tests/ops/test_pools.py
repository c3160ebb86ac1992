"""Choosing pools of keys by their index keys and attending to them, against loops over single queries."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import PoolRule
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable

RULE, HEADS, DIM, BLOCK = PoolRule(4, 5), 3, 8, 64
KV_HEADS, KEY_DIM = 2, 6


@pytest.fixture(scope="module", params=[False, True], ids=["free", "fixed"])
def ops(request: pytest.FixtureRequest) -> OpTable:
    return torch_table(request.param)


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


def test_bits_depend_neither_on_chunks_nor_on_other_rows() -> None:
    fixed, sequence = torch_table(True), Sequence()
    whole = sequence.part(fixed, 0, 200)
    for cuts in ([0, 64, 128, 192, 200], [0, 128, 200], [0, 192, 200]):
        parts = [sequence.part(fixed, *cut) for cut in pairwise(cuts)]
        assert all(torch.equal(torch.cat(own), want) for own, want in zip(zip(*parts, strict=True), whole, strict=True))
    together = sequence.part(fixed, 100, 140, decodes=True)
    alone = [sequence.part(fixed, at, at + 1, decodes=True) for at in range(100, 140)]
    assert all(torch.equal(torch.cat(own), want) for own, want in zip(zip(*alone, strict=True), together, strict=True))

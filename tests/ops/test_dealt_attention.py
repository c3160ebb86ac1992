"""Attention over keys that are dealt to ranks, against a plain softmax over all of a row's keys."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.attention.dealt import ALL, Deal, attend_dealt
from forkpoint.ops.attention.reference import kv_write, paged_attention
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.ranks import Ranks
from forkpoint.runtime.block_table import BlockTable
from tests.thread_ranks import on_each

HEADS, KV_HEADS, DIM, VALUE_DIM, SCALE = 4, 2, 8, 12, 0.3
BLOCK, WINDOW = 16, 10


@dataclass(frozen=True)
class Case:
    """Rows `(tokens before, new tokens)`: of several new tokens all but the first are drafts."""

    rows: tuple[tuple[int, int], ...]
    interleave: int = 1
    kernel_block: int = BLOCK

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the new tokens, keys and values of all, the same for every rank."""
        generator = torch.Generator().manual_seed(sum(sum(row) for row in self.rows))
        count, new = sum(sum(row) for row in self.rows), sum(new for _, new in self.rows)
        sizes = (new, HEADS, DIM), (count, KV_HEADS, DIM), (count, KV_HEADS, VALUE_DIM)
        q, k, v = (torch.randn(*size, generator=generator) for size in sizes)
        return q, k, v

    def seen(self) -> np.ndarray:
        """How many keys each query sees: drafts see those of the tokens before them."""
        return np.concatenate([np.arange(before, before + new) + 1 for before, new in self.rows])

    def group(self, deal: Deal, kernel_block: int, first_id: int) -> tuple[Tensor, Tensor, AttentionIndex]:
        """What a rank keeps in one group of layers, whose rows hold as many blocks as it needs, and where it is."""
        _, k, v = self.tensors()
        lens = [sum(row) for row in self.rows]
        widths = [-(-length // (BLOCK * deal.num_ranks)) for length in lens]
        table = BlockTable(len(lens), max(widths), BLOCK, kernel_block_size=kernel_block, deal=deal)
        ids = np.random.default_rng(first_id).permutation(sum(widths)).astype(np.int32) + np.int32(first_id)
        for row, width in enumerate(widths):
            table.add(row, ids[sum(widths[:row]) :][:width])
        count = (first_id + sum(widths)) * table.ratio
        caches = [torch.full((count, KV_HEADS, kernel_block, dim), float("nan")) for dim in (DIM, VALUE_DIM)]
        rows = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
        slots = table.kv_slots(rows, np.concatenate([np.arange(length) for length in lens]))
        kv_write(k, v, *caches, torch.from_numpy(slots))
        asking = np.repeat(np.arange(len(lens)), [new for _, new in self.rows]).tolist()
        kept, ones = deal.count(self.seen()).tolist(), [1] * len(asking)
        index = attention_index(ones, kept, table.device, torch.empty(0), len(ones), asking, None)
        return caches[0], caches[1], index

    def answers(self, ranks: Ranks) -> Tensor:
        """Return the outputs of a layer whose keys are dealt, and of a layer in its own group that each rank keeps
        whole."""
        q = self.tensors()[0]
        deal = Deal(ranks.rank, ranks.size, self.interleave)
        dealt = attend_dealt(q, *self.group(deal, self.kernel_block, 2), SCALE, ranks)
        return torch.stack([dealt, paged_attention(q, *self.group(ALL, BLOCK, 5), SCALE, WINDOW)])

    def expected(self) -> Tensor:
        q, k, v = self.tensors()
        ends = np.cumsum([sum(row) for row in self.rows])
        firsts = np.repeat(ends - [sum(row) for row in self.rows], [new for _, new in self.rows])
        out = torch.empty(2, len(q), HEADS, VALUE_DIM)
        for i, (first, seen) in enumerate(zip(firsts.tolist(), self.seen().tolist(), strict=True)):
            for answer, low in zip(out, (0, max(0, seen - WINDOW)), strict=True):
                keys, values = (x[first + low : first + seen].repeat_interleave(2, 1) for x in (k, v))
                weights = torch.einsum("hd,khd->hk", q[i] * SCALE, keys).softmax(-1)
                answer[i] = torch.einsum("hk,khv->hv", weights, values)
        return out


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([4, 8, 16]),
)
def test_answers_are_those_over_all_keys(
    rows: list[tuple[int, int]], num_ranks: int, interleave: int, kernel_block: int
) -> None:
    case = Case(tuple(rows), interleave, kernel_block)
    for found in on_each(num_ranks, True, case.answers):
        torch.testing.assert_close(found, case.expected(), rtol=1e-4, atol=1e-5)


CASES = [Case(((0, 1), (40, 1), (63, 3)), 1), Case(((1, 2), (30, 1)), 4, 8), Case(((90, 4), (16, 1)), 16, 8)]


def _one(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.meet("gloo", rank, 2, folder / "meeting", True, torch.device("cpu"))
    torch.save([case.answers(ranks) for case in CASES], folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may else still run where the process ends, which aborts it


def test_over_gloo(tmp_path: Path) -> None:
    """Two processes; the first row's only key is one rank's."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_one, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for rank in range(2):
        for case, found in zip(CASES, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            torch.testing.assert_close(found, case.expected(), rtol=1e-4, atol=1e-5)

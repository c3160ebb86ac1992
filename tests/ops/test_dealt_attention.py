"""Attention over keys that are dealt to ranks, against a plain softmax over all of a row's keys."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.config import BLOCK_SIZE
from forkpoint.ops.attention.dealt import attend
from forkpoint.ops.attention.reference import kv_write
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.select import select_table
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.block_table import BlockTable
from forkpoint.runtime.dealt_keys import DealtKeys
from tests.ops.plain_attention import plain_attention
from tests.thread_ranks import on_each

HEADS, DIM, VALUE_DIM, SCALE = 2, 8, 12, 0.3  # a rank's heads, which share one key head with those of other ranks


@dataclass(frozen=True)
class Case:
    """Decode rows and prompts `(tokens before, new tokens)`: new tokens of a decode row after the first are drafts."""

    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...] = ()
    interleave: int = 1
    kernel_block: int = 8
    window: int | None = None

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        return self.decodes + self.prompts

    def tensors(self, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the new tokens and all ranks' heads, and keys and values of all tokens."""
        generator = torch.Generator().manual_seed(sum(sum(row) for row in self.rows))
        count, new = sum(sum(row) for row in self.rows), sum(new for _, new in self.rows)
        sizes = (new, num_ranks * HEADS, DIM), (count, 1, DIM), (count, 1, VALUE_DIM)
        q, k, v = (torch.randn(*size, generator=generator) for size in sizes)
        return q, k, v

    def kept(self, ranks: Ranks) -> tuple[Tensor, Tensor, AttentionIndex]:
        """What a rank keeps, in blocks that lie anywhere, and where it is."""
        _, k, v = self.tensors(ranks.size)
        keys = DealtKeys(ranks, self.interleave, 32, CpuPlatform(), None)
        lens = [sum(row) for row in self.rows]
        widths = [-(-length // BLOCK_SIZE) for length in lens]
        size = BLOCK_SIZE // ranks.size
        table = BlockTable(
            len(lens), max(widths), size, CpuPlatform(), kernel_block_size=self.kernel_block, deal=keys.deal
        )
        ids = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32) + np.int32(2)
        for row, width in enumerate(widths):
            table.add(row, ids[sum(widths[:row]) :][:width])
        count = (2 + sum(widths)) * table.ratio
        caches = [torch.full((count, 1, self.kernel_block, dim), float("nan")) for dim in (DIM, VALUE_DIM)]
        rows = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
        positions = np.concatenate([np.arange(length) for length in lens])
        places = torch.from_numpy(table.key_places(rows, positions))
        assert torch.equal(table.device_key_places(torch.from_numpy(rows).long(), torch.from_numpy(positions)), places)
        kv_write(k, v, *caches, places)
        decodes, at = [new for _, new in self.decodes], len(self.decodes)
        lines = [*np.repeat(np.arange(at), decodes).tolist(), *range(at, len(lens))]
        seen = [before + 1 + i for before, new in self.decodes for i in range(new)] + lens[at:]
        queries = [1] * sum(decodes) + [new for _, new in self.prompts]
        index = attention_index(queries, seen, table.device, torch.empty(0), sum(decodes), lines, None)
        return caches[0], caches[1], keys.complete(index, table, index.on_host())

    def answers(self, ranks: Ranks) -> Tensor:
        """Return the outputs of this rank's heads."""
        own = self.tensors(ranks.size)[0][:, ranks.rank * HEADS :][:, :HEADS].contiguous()
        ops = select_table("torch", ranks.gathers, False)
        return attend(ops, own, *self.kept(ranks), SCALE, self.window)

    def check(self, found: list[Tensor]) -> None:
        """Compare the outputs of all ranks."""
        q, k, v = self.tensors(len(found))
        keys, values = (torch.split(x, [sum(row) for row in self.rows]) for x in (k, v))
        out = plain_attention(q, [new for _, new in self.rows], keys, values, SCALE, self.window)
        torch.testing.assert_close(torch.cat(found, 1).double(), out, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), max_size=3),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), min_size=1, max_size=2),
    st.sampled_from([(2, 1), (2, 8), (2, 32), (4, 2), (4, 16)]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([None, 10, 100]),
    st.booleans(),
)
def test_answers_are_those_over_all_keys(
    decodes: list[tuple[int, int]],
    prompts: list[tuple[int, int]],
    deal: tuple[int, int],
    kernel_block: int,
    window: int | None,
    gathers: bool,
) -> None:
    num_ranks, interleave = deal
    case = Case(tuple(decodes), tuple(prompts), interleave, kernel_block, window)
    case.check(on_each(num_ranks, gathers, case.answers))


CASES = [
    Case(((0, 1), (40, 1), (63, 3)), ((70, 9),)),
    Case(((1, 2), (130, 1)), (), 16),
    Case((), ((90, 4), (0, 16)), 4),
]


def _one(rank: int, folder: Path, size: int, context_size: int) -> None:
    torch.set_num_threads(1)
    place, cpu = folder / "meeting", torch.device("cpu")
    ranks = Ranks.meet("gloo", rank, size, place, False, cpu, context_size)
    torch.save([case.answers(ranks.context) for case in CASES], folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may else still run where the process ends, which aborts it


def test_over_gloo(tmp_path: Path) -> None:
    """Four processes in two groups; the first row's only key is one rank's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by each process
    processes = [context.Process(target=_one, args=(rank, tmp_path, 4, 2)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for group in (found[:2], found[2:]):
        for i, case in enumerate(CASES):
            case.check([answers[i] for answers in group])


def test_more_keys_than_are_gathered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.runtime.dealt_keys.MOST_GATHERED", 100)
    case = Case(((10, 1), (90, 2)), ((70, 9), (0, 50), (140, 1), (0, 3)), 8)
    for gathers in (False, True):
        case.check(on_each(2, gathers, case.answers))


def test_decode_rows_need_no_launch_for_their_queries() -> None:
    """Each step would make it again."""
    _, _, index = CASES[1].kept(Ranks(0, 2))
    assert index.dealt is not None and index.dealt.local is not None
    assert index.dealt.local.cu_queries.data_ptr() == index.cu_queries.data_ptr(), "a view"

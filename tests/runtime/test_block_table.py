"""The block table: rows of blocks, where their tokens are kept, on one rank and on several, compaction and the copy on
the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forkpoint.errors import BlockTableError, ConfigError
from forkpoint.ops.deal import Deal
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.block_table import NO_PLACE, BlockTable
from forkpoint.sched.plan import IntArray, Move, MoveKind

CPU = CpuPlatform()


def ints(*values: int) -> IntArray:
    return np.asarray(values, np.int32)


def append(table: BlockTable, **rows: list[int]) -> None:
    """Blocks for rows `r0`, `r1`, ..."""
    pointers = np.cumsum([0, *(len(ids) for ids in rows.values())], dtype=np.int32)
    numbers = ints(*(int(name[1:]) for name in rows))
    table.append(numbers, pointers, ints(*(block for ids in rows.values() for block in ids)))


def places_of(table: BlockTable, positions: range | list[int], row: int = 0) -> list[int]:
    where = np.asarray(list(positions), np.int64)
    places: list[int] = table.key_places(np.full(len(where), row, np.int32), where).tolist()
    return places


class TestRows:
    def test_append_takes_parts_of_any_length(self) -> None:
        table = BlockTable(4, 4, 4, CPU)
        append(table, r1=[5])
        append(table, r2=[7, 8], r0=[], r1=[1, 2, 3])
        append(table)
        assert [table.num_blocks(row) for row in range(4)] == [0, 4, 2, 0]
        assert table.host.tolist() == [[0] * 4, [5, 1, 2, 3], [7, 8, 0, 0], [0] * 4]

    def test_capacity_is_checked_and_nothing_is_half_done(self) -> None:
        table = BlockTable(2, 3, 8, CPU)
        append(table, r0=[1, 2])
        with pytest.raises(BlockTableError, match="row 0 has 2 blocks and was given 2 more; a row holds 3"):
            append(table, r1=[8], r0=[3, 4])
        assert [table.num_blocks(row) for row in range(2)] == [2, 0]
        append(table, r0=[3])
        assert table.host[0].tolist() == [1, 2, 3]

    @pytest.mark.parametrize("row", [-1, 2])
    def test_rows_are_checked(self, row: int) -> None:
        with pytest.raises(BlockTableError, match=str(row)):
            BlockTable(2, 3, 8, CPU).append(ints(row), ints(0, 1), ints(1))

    def test_no_stale_ids_after_add_and_clear(self) -> None:
        table = BlockTable(3, 4, 4, CPU)
        append(table, r0=[1, 2, 3, 4])
        table.add(0, ints(9))
        assert table.host[0].tolist() == [9, 0, 0, 0] and table.num_blocks(0) == 1
        table.clear_row(0)
        assert not table.host.any() and table.num_blocks(0) == 0

    def test_remap_follows_moves_in_order_and_leaves_unused_entries(self) -> None:
        table = BlockTable(3, 4, 8, CPU)
        append(table, r0=[1, 2, 3], r1=[2, 5])
        block = MoveKind.BLOCK
        table.remap([Move(block, 2, 9), Move(MoveKind.SLOT, 3, 30), Move(block, 5, 2), Move(block, 0, 40)])
        assert table.host.tolist() == [[1, 9, 3, 0], [9, 2, 0, 0], [0] * 4]

    def test_remap_tells_a_block_from_a_new_one_in_its_place(self) -> None:
        """Compaction empties one page twice in a plan: blocks of rows first, then new ones that no row names yet."""
        table = BlockTable(2, 4, 8, CPU)
        append(table, r0=[49, 50, 3], r1=[37])
        table.clear_row(1)
        block = MoveKind.BLOCK
        table.remap([Move(block, 49, 37), Move(block, 50, 38), Move(block, 49, 41), Move(block, 50, 17)])
        assert table.host[0].tolist() == [37, 38, 3, 0]
        table.remap([Move(block, 37, 5), Move(block, 5, 6), Move(block, 37, 5)])
        assert table.host[0].tolist() == [6, 38, 3, 0]

    def test_commit_brings_changes_to_the_device(self) -> None:
        class Apart(CpuPlatform):
            """A device with memory of its own."""

            def __init__(self) -> None:
                super().__init__()
                self.shares_memory = False

            def upload(self, array: np.ndarray) -> Tensor:
                return torch.from_numpy(array.copy())

        table, near = BlockTable(4, 5, 4, Apart()), BlockTable(4, 5, 4, CPU)
        device = table.device
        for each in (table, near):
            append(each, r0=[1], r3=[4, 5], r1=[8, 8, 8])
        assert not device.any()
        table.commit()
        assert device.tolist() == table.host.tolist() == near.device.tolist()
        append(table, r0=[2], r3=[2])
        table.remap([Move(MoveKind.BLOCK, 8, 9)])
        table.add(1, ints(7, 9))
        assert device.tolist() != table.host.tolist()
        table.commit()
        for row in range(4):
            used = table.num_blocks(row)
            assert device[row, :used].tolist() == table.host[row, :used].tolist()


class TestSlots:
    def test_two_rows(self) -> None:
        table = BlockTable(2, 4, 128, CPU)
        append(table, r0=[0, 1, 2, 3], r1=[4, 5, 6, 7])
        assert table.key_places(ints(0, 0, 1, 1), np.array([0, 1, 0, 1])).tolist() == [0, 1, 512, 513]

    def test_every_call_computes_anew(self) -> None:
        table = BlockTable(2, 4, 384, CPU)
        append(table, r0=[1])
        first = places_of(table, [0, 300])
        table.add(0, ints(2))
        assert places_of(table, [0, 300]) == [slot + 384 for slot in first]

    def test_positions_past_the_blocks_are_named(self) -> None:
        table = BlockTable(2, 4, 4, CPU)
        append(table, r1=[3])
        with pytest.raises(BlockTableError, match="token 4 of row 1"):
            table.key_places(ints(1, 1), np.array([3, 4]))

    def test_large_ids_and_scattered_positions_are_exact(self) -> None:
        table = BlockTable(1, 64, 16, CPU)
        append(table, r0=[2**24 + 1 + i for i in range(64)])
        assert places_of(table, [0, 320]) == [(2**24 + 1) * 16, (2**24 + 21) * 16]
        table.add(0, ints(2**31 - 1))
        assert places_of(table, [15]) == [(2**31 - 1) * 16 + 15]

    @pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
    def test_whole_rows(self, length: int) -> None:
        table = BlockTable(1, 128, 128, CPU)
        ids = np.random.default_rng(length).permutation(128).astype(np.int32)
        table.add(0, ids)
        expected = [int(ids[p // 128]) * 128 + p % 128 for p in range(length)]
        assert places_of(table, range(length)) == expected


class TestKernelBlocks:
    def test_slots_do_not_depend_on_the_split(self) -> None:
        table, whole = BlockTable(1, 4, 2048, CPU, kernel_block_size=128), BlockTable(1, 4, 2048, CPU)
        for each in (table, whole):
            append(each, r0=[3, 0])
            assert each.num_blocks(0) == 2
        assert table.host[0, :32].tolist() == [*range(48, 64), *range(16)]
        assert places_of(table, [2047, 2048]) == [8191, 0] == places_of(whole, [2047, 2048])

    def test_rows_fill_up_in_whole_blocks(self) -> None:
        table = BlockTable(2, 3, 8, CPU, kernel_block_size=4)
        append(table, r1=[5], r0=[1, 2])
        with pytest.raises(BlockTableError, match="row 0 has 2 blocks and was given 2 more; a row holds 3"):
            append(table, r1=[6], r0=[3, 4])
        append(table, r1=[6], r0=[3])
        assert table.host.tolist() == [[2, 3, 4, 5, 6, 7], [10, 11, 12, 13, 0, 0]]
        table.remap([Move(MoveKind.BLOCK, 5, 9), Move(MoveKind.BLOCK, 2, 5)])
        assert table.host.tolist() == [[2, 3, 10, 11, 6, 7], [18, 19, 12, 13, 0, 0]]
        with pytest.raises(BlockTableError, match="token 16 of row 1 lies past its 2 blocks of 8"):
            places_of(table, [15, 16], 1)


def dealt_one_by_one(deal: Deal, block_size: int, ids: list[int], count: int) -> list[list[int]]:
    """Each rank's places of tokens `[0, count)`, by dealing out what one id stands for, token by token."""
    places = [[NO_PLACE] * count for _ in range(deal.num_ranks)]
    for position in range(count):
        number, offset = divmod(position, block_size * deal.num_ranks)
        rank = offset // deal.interleave % deal.num_ranks
        before = sum(o // deal.interleave % deal.num_ranks == rank for o in range(offset))
        places[rank][position] = ids[number] * block_size + before
    return places


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(ranks, interleave, kernel blocks of a block, their size); the interleave divides a block."""
    kernel_blocks, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 6]))
    interleave = draw(st.sampled_from([i for i in range(1, kernel_blocks * size + 1) if kernel_blocks * size % i == 0]))
    return draw(st.integers(1, 5)), interleave, kernel_blocks, size


class TestDeal:
    @given(deals(), st.permutations(range(1, 61)), st.integers(1, 60))
    def test_every_token_has_one_owner_and_its_own_place(
        self, sizes: tuple[int, int, int, int], ids: list[int], count: int
    ) -> None:
        ranks, interleave, kernel_blocks, size = sizes
        block = kernel_blocks * size
        num_ids = -(-count // (block * ranks))
        want = dealt_one_by_one(Deal(0, ranks, interleave), block, ids, count)
        for rank in range(ranks):
            deal = Deal(rank, ranks, interleave)
            table = BlockTable(2, num_ids, block, CPU, kernel_block_size=size, deal=deal)
            table.add(1, ints(*ids[:num_ids]))
            assert places_of(table, range(count), 1) == want[rank]
            kept = np.cumsum([place != NO_PLACE for place in want[rank]])
            assert deal.count(np.arange(1, count + 1)).tolist() == kept.tolist()

    @given(deals())
    def test_blocks_that_are_dealt_are_not_those_of_kernels(self, sizes: tuple[int, int, int, int]) -> None:
        """To fill kernel blocks in turn, as vllm-ascend once did, is the same where the interleave divides them."""
        ranks, interleave, kernel_blocks, size = sizes
        block = kernel_blocks * size
        ours = dealt_one_by_one(Deal(0, ranks, interleave), block, [3], block * ranks)
        split = [3 * kernel_blocks + i for i in range(kernel_blocks)]
        theirs = dealt_one_by_one(Deal(0, ranks, interleave), size, split, block * ranks)
        assert (ours == theirs) == (ranks == 1 or size % interleave == 0)

    def test_a_kernel_block_that_the_interleave_does_not_divide(self) -> None:
        """There tokens of kernel blocks had two places, and a rank none of the second run."""
        tables = [BlockTable(1, 2, 8, CPU, kernel_block_size=4, deal=Deal(rank, 2, 8)) for rank in range(2)]
        for table in tables:
            append(table, r0=[5, 9])
            assert table.host[0].tolist() == [10, 11, 18, 19]
        assert places_of(tables[0], range(16)) == [*range(40, 48), *[NO_PLACE] * 8]
        assert places_of(tables[1], range(16)) == [*[NO_PLACE] * 8, *range(40, 48)]

    def test_runs_shorter_than_a_kernel_block(self) -> None:
        first = BlockTable(1, 2, 8, CPU, kernel_block_size=4, deal=Deal(0, 2, 2))
        append(first, r0=[5, 9])
        row = [40, 41, -1, -1, 42, 43, -1, -1, 44, 45, -1, -1, 46, 47, -1, -1, 72, 73]
        assert places_of(first, range(18)) == row
        with pytest.raises(BlockTableError, match="token 32 of row 0 lies past its 2 blocks of 16 tokens"):
            places_of(first, [32])

    def test_an_interleave_that_does_not_divide_a_block_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="interleave of 3 tokens does not divide a block of 8"):
            BlockTable(1, 2, 8, CPU, deal=Deal(0, 2, 3))

"""Pages, units and compaction: any sequence of takes and gives leaves every page and unit with one owner."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.cache.arena import Arena, Move, MoveKind, MoveRoute
from forkpoint.errors import ConfigError
from tests.sched.harness import LAYOUTS

HYBRIDS = ["several blocks a page", "several slots a page", "one each"]


@dataclass(eq=False)
class Owner:
    unit: int = -1
    label: int = 0

    def rebind(self, move: Move) -> None:
        assert self.unit == move.src
        self.unit = move.dst


def take(arena: Arena, is_slot: bool) -> Owner | None:
    owner = Owner()
    unit = arena.take_slot(owner) if is_slot else next(iter(arena.take_blocks(owner, 1)), None)
    if unit is None:
        return None
    owner.unit = unit
    return owner


def give(arena: Arena, is_slot: bool, owner: Owner) -> None:
    if is_slot:
        arena.give_slot(owner.unit)
    else:
        arena.give_blocks([owner.unit])


@pytest.mark.parametrize("name", HYBRIDS)
@settings(max_examples=60, deadline=None)
@given(
    num_pages=st.integers(2, 9), ops=st.lists(st.tuples(st.sampled_from("bsgggd"), st.integers(0, 999)), max_size=150)
)
def test_takes_and_gives(name: str, num_pages: int, ops: list[tuple[str, int]]) -> None:
    """Contents follow the moves: after replaying them each owner still finds what it wrote."""
    layout = LAYOUTS[name]
    arena = Arena(layout, num_pages)
    held: dict[bool, list[Owner]] = {False: [], True: []}
    memory: dict[tuple[bool, int], int] = {}  # what is written where
    label = 0
    for op, pick in ops:
        if op in "bs":
            owner = take(arena, op == "s")
            if owner is None:
                free = layout.page_bytes * (num_pages - 1) - sum(
                    len(held[k]) * (layout.slot_stride_bytes if k else layout.block_stride_bytes) for k in held
                )
                assert free < 3 * layout.page_bytes, "room was left"
            for move in arena.drain_moves():
                memory[move.kind is MoveKind.SLOT, move.dst] = memory.pop((move.kind is MoveKind.SLOT, move.src))
            if owner is not None:
                label += 1
                owner.label = label
                held[op == "s"].append(owner)
                memory[op == "s", owner.unit] = label
        elif owners := held[op == "d"]:
            owner = owners.pop(pick % len(owners))
            give(arena, op == "d", owner)
            assert memory.pop((op == "d", owner.unit)) == owner.label
        arena.check_integrity()
    for is_slot, owners in held.items():
        assert all(memory[is_slot, owner.unit] == owner.label for owner in owners)
    for is_slot, owners in held.items():
        for owner in owners:
            give(arena, is_slot, owner)
    arena.check_integrity()
    assert arena.num_free_pages == num_pages - 1


@pytest.mark.parametrize("name", HYBRIDS)
@settings(max_examples=40, deadline=None)
@given(
    num_pages=st.integers(2, 9),
    ops=st.lists(
        st.tuples(st.sampled_from(["take", "take", "slot", "give", "reissue"]), st.integers(0, 40), st.integers(0, 99)),
        max_size=40,
    ),
)
def test_many_at_once_are_as_many_one_by_one(name: str, num_pages: int, ops: list[tuple[str, int, int]]) -> None:
    arenas = [Arena(LAYOUTS[name], num_pages) for _ in range(2)]
    at_once, one_by_one = arenas
    anybody = Owner()
    held: list[int] = []
    for op, count, start in ops:
        start %= len(held) + 1
        some = held[start : start + count]
        if op == "take":
            found = at_once.take_blocks(anybody, count)
            singles = [one_by_one.take_blocks(anybody, 1) for _ in range(count)]
            assert found == [block for single in singles for block in single]
            held += found
        elif op == "slot":
            assert at_once.take_slot(anybody, compact=False) == one_by_one.take_slot(anybody, compact=False)
        elif op == "give":
            at_once.give_blocks(some)
            for block in some:
                one_by_one.give_blocks([block])
            del held[start : start + count]
        elif at_once.num_blocks_until_page == LAYOUTS[name].blocks_per_page and not at_once.num_free_pages:
            at_once.reissue_blocks(some, anybody)
            for block in some:
                one_by_one.give_blocks([block])
                assert one_by_one.take_blocks(anybody, 1) == [block]
        assert at_once.turnover == one_by_one.turnover
        assert at_once.num_free_pages == one_by_one.num_free_pages
        at_once.check_integrity()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_slot_is_found_once_enough_blocks_are_free(name: str) -> None:
    arena = Arena(LAYOUTS[name], 4)
    owners = []
    while (owner := take(arena, False)) is not None:
        owners.append(owner)
    for owner in owners[::3]:
        count = arena.num_blocks_until_page
        slot = arena.take_slot(Owner())
        assert (count <= 0) == (slot is not None)
        if slot is not None:
            return
        give(arena, False, owner)
    assert take(arena, True) is not None


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("is_slot", [False, True])
def test_one_kind_can_take_everything(name: str, is_slot: bool) -> None:
    layout = LAYOUTS[name]
    arena = Arena(layout, 6)
    owners = []
    while (owner := take(arena, is_slot)) is not None:
        owners.append(owner)
    assert len(owners) == 5 * (layout.slots_per_page if is_slot else layout.blocks_per_page)
    assert take(arena, not is_slot) is None
    assert min(owner.unit for owner in owners) > 0, "page 0 was handed out"


def test_compaction_moves_the_emptiest_page() -> None:
    layout = LAYOUTS["several blocks a page"]
    per_page = layout.blocks_per_page
    arena = Arena(layout, 4)
    blocks = [take(arena, False) for _ in range(3 * per_page)]
    by_page: dict[int, list[Owner]] = {}
    for owner in blocks:
        assert owner is not None
        by_page.setdefault(owner.unit // per_page, []).append(owner)
    first, second, _ = by_page.values()
    for owner in first[1:]:
        arena.give_blocks([owner.unit])
    arena.give_blocks([second[0].unit])
    kept, src = first[0], first[0].unit
    assert take(arena, True) is not None
    (move,) = arena.drain_moves()
    assert move == Move(MoveKind.BLOCK, src, kept.unit)
    assert kept.unit // per_page == second[1].unit // per_page
    arena.check_integrity()


def test_new_units_go_to_the_fullest_page() -> None:
    layout = LAYOUTS["several blocks a page"]
    per_page = layout.blocks_per_page
    arena = Arena(layout, 4)
    owners = [take(arena, False) for _ in range(2 * per_page)]
    for owner in (owners[0], owners[1], owners[per_page]):
        assert owner is not None
        arena.give_blocks([owner.unit])
    freed = owners[per_page]
    again = take(arena, False)
    assert again is not None and freed is not None and again.unit == freed.unit


def test_periodic_checkpoints_do_not_compact() -> None:
    layout = LAYOUTS["several blocks a page"]
    arena = Arena(layout, 2)
    owner = take(arena, False)
    assert owner is not None
    assert arena.take_slot(Owner(), compact=False) is None
    arena.give_blocks([owner.unit])
    assert arena.take_slot(Owner(), compact=False) is not None


def test_turnover_counts_arenas() -> None:
    layout = LAYOUTS["one each"]
    arena = Arena(layout, 5)
    for _ in range(10):
        owner = take(arena, False)
        assert owner is not None
        arena.give_blocks([owner.unit])
    assert arena.turnover == pytest.approx(10 * layout.block_stride_bytes / (5 * layout.page_bytes))


def test_an_arena_needs_a_page() -> None:
    with pytest.raises(ConfigError, match="2 pages"):
        Arena(LAYOUTS["one each"], 1)


def test_moves_of_other_rooms_do_not_say_where_a_slot_is() -> None:
    arena = Arena(LAYOUTS["one each"], 4)
    arena.moves += [Move(MoveKind.SLOT, 3, 5, MoveRoute.HOST), Move(MoveKind.BLOCK, 4, 5, MoveRoute.ARENA)]
    assert arena.issued_slot(5) == 5
    arena.moves += [Move(MoveKind.SLOT, 7, 5, MoveRoute.ARENA), Move(MoveKind.SLOT, 5, 2, MoveRoute.STORE)]
    assert arena.issued_slot(5) == 7 and arena.issued_slot(2) == 2

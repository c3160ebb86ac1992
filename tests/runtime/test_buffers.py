"""The arena's views: where bytes lie, that nothing overlaps, and moves."""

from __future__ import annotations

import pytest
import torch

from forkpoint.cache.layout import CacheLayout, KVSpec, StateSpec
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.sched.plan import Move, MoveKind

KV = (KVSpec(2, 16, 24, "bfloat16"), KVSpec(1, 8, 8, "float32"))
STATES = (
    StateSpec((3, 40), "bfloat16", (4, 16, 8), "float32"),
    StateSpec((3, 17), "float32", (), "float32"),
    StateSpec((), "float32", (2, 5, 7), "float32"),
)


@pytest.fixture
def arena() -> ArenaBuffer:
    return ArenaBuffer(CacheLayout.create(KV, STATES), 5)


def views(arena: ArenaBuffer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    blocks = [view for cache in arena.kv for view in (cache.k, cache.v)]
    return blocks, [view for cache in arena.states for view in (cache.conv, cache.matrix) if view.numel()]


def test_shapes_and_places(arena: ArenaBuffer) -> None:
    layout = arena.layout
    assert arena.kv[0].k.shape == (arena.num_blocks, 2, 64, 16)
    assert arena.kv[0].v.shape == (arena.num_blocks, 2, 64, 24)
    assert arena.states[0].conv.shape == (arena.num_slots, 3, 40)
    assert arena.states[0].matrix.shape == (arena.num_slots, 4, 16, 8)
    assert arena.states[1].matrix.shape == arena.states[2].conv.shape == (arena.num_slots, 0)
    base = arena.data.data_ptr()
    block = layout.block_stride_bytes
    assert arena.kv[0].v[2].data_ptr() == base + 2 * block + KV[0].key_bytes(64)
    assert arena.kv[1].k[1].data_ptr() == base + block + KV[0].block_bytes(64)
    slot = layout.slot_stride_bytes
    assert arena.states[0].matrix[3].data_ptr() == base + 3 * slot + STATES[0].conv_bytes
    assert arena.states[2].matrix[0].data_ptr() == base + STATES[0].slot_bytes + STATES[1].slot_bytes
    assert all(view[0].is_contiguous() for kind in views(arena) for view in kind)


@pytest.mark.parametrize("kind", [0, 1])
def test_views_do_not_overlap(arena: ArenaBuffer, kind: int) -> None:
    own = views(arena)[kind]
    for number, view in enumerate(own):
        for index in range(len(view)):
            view[index] = number * 100 + index
    for number, view in enumerate(own):
        for index in range(len(view)):
            assert (view[index] == torch.tensor(number * 100 + index).to(view.dtype)).all()


@pytest.mark.parametrize("kind", list(MoveKind))
def test_a_move_copies_one_unit_whole(arena: ArenaBuffer, kind: MoveKind) -> None:
    own = views(arena)[0 if kind is MoveKind.BLOCK else 1]
    generator = torch.Generator().manual_seed(1)
    for view in own:
        view.copy_(torch.randn(view.shape, generator=generator))
    before = [view.clone() for view in own]
    size = arena.layout.block_bytes if kind is MoveKind.BLOCK else arena.layout.slot_bytes
    assert arena.move([Move(kind, 1, 3), Move(kind, 2, 1)]) == 2 * size
    for old, view in zip(before, own, strict=True):
        assert torch.equal(view[3], old[1])
        assert torch.equal(view[1], old[2])
        rest = [i for i in range(len(view)) if i not in (1, 3)]
        assert torch.equal(view[rest], old[rest])


def test_layouts_of_one_kind() -> None:
    only_kv = ArenaBuffer(CacheLayout.create(KV, ()), 3)
    assert only_kv.states == () and only_kv.num_slots == 0 and only_kv.num_blocks == 3
    only_states = ArenaBuffer(CacheLayout.create((), STATES), 3)
    assert only_states.kv == () and only_states.num_blocks == 0 and only_states.num_slots == 3

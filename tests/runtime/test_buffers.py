"""The arena's views: where bytes lie, that nothing overlaps, and moves."""

from __future__ import annotations

import pytest
import torch

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, StateSpec, TensorSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.errors import ConfigError
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.sched.plan import Move, MoveKind
from tests.cache.shapes import state

KEYS = KVSpec.of(2, 16, 24, "bfloat16", takes_fp8=True)
LATENT = KVSpec((TensorSpec("latent", (1, 24 + 8), "bfloat16"),))  # as of MLA: no values of their own
WINDOW = state((2, 33), None, "float32")  # a short convolution's
LAYERS: dict[str, LayerSpec] = {
    "attention": (KEYS,),
    "delta rule": (state((3, 40), (4, 16, 8)),),
    "mlp": (),
    "short convolution": (WINDOW,),
    "mamba-1": (state((3, 18), (18, 7)),),  # [channels, state]
    "mamba-2": (state((3, 40), (4, 9, 16)),),  # [heads, head_dim, state]
    "kda": (  # a window for each of q, k and v, a matrix of all heads
        StateSpec(
            (
                *(TensorSpec(f"{part}_conv", (3, 24), "bfloat16") for part in "qkv"),
                TensorSpec("matrix", (2, 12, 12), "float32"),
            )
        ),
    ),
    "mla": (LATENT,),
    "in 8 bits": (KEYS.in_fp8(),),
    "parallel": (KVSpec.of(1, 8, 8, "float32"), state(None, (2, 5, 7))),
}
NUMBER = {name: index for index, name in enumerate(LAYERS)}


@pytest.fixture(params=[(), (48, 16, 32)], ids=["", "kernel blocks"])
def arena(request: pytest.FixtureRequest) -> ArenaBuffer:
    return ArenaBuffer(CacheLayout.create(list(LAYERS.values()), kernel_block_sizes=request.param), 5, CpuPlatform())


def num_blocks(arena: ArenaBuffer) -> int:
    return arena.num_pages * arena.layout.blocks_per_page


def views(arena: ArenaBuffer, kind: MoveKind) -> list[torch.Tensor]:
    """Return views by block or slot. A block's kernel blocks are one dimension."""
    if kind is MoveKind.SLOT:
        return [pool for *_, pool in arena.states]
    return [view.unflatten(0, (num_blocks(arena), arena.layout.kernel_blocks)) for view in arena.block_views]


def test_layers_see_what_they_declare(arena: ArenaBuffer) -> None:
    for layer, cache in zip(LAYERS.values(), arena.layers, strict=True):
        declared = [(tensor, isinstance(spec, KVSpec)) for spec in layer for tensor in spec.tensors]
        assert list(cache) == [tensor.name for tensor, _ in declared]
        for tensor, is_of_tokens in declared:
            view, (first, *rest) = cache[tensor.name], tensor.shape
            if is_of_tokens:
                size, count = arena.layout.kernel_block_size, arena.layout.kernel_blocks
                assert size * count == 64 and count in (1, 4)
                assert view.shape == (num_blocks(arena) * count, first, size, *rest)
                assert view.stride(0) * view.element_size() * count == arena.layout.block_stride_bytes
            else:
                assert view.shape == (arena.num_slots, *tensor.shape)
                assert view.stride(0) * view.element_size() == arena.layout.slot_stride_bytes
            assert view[0].is_contiguous() and str(view.dtype) == f"torch.{tensor.dtype}"


def test_layers_lie_behind_each_other(arena: ArenaBuffer) -> None:
    layout, base = arena.layout, arena.data.data_ptr()
    block, slot = layout.block_stride_bytes // layout.kernel_blocks, layout.slot_stride_bytes
    size = layout.kernel_block_size
    attention, mla, parallel = (arena.layers[NUMBER[name]] for name in ("attention", "mla", "parallel"))
    keys = KEYS.tensors[0].num_bytes(size)
    assert attention["v"][2].data_ptr() == base + 2 * block + keys
    assert mla["latent"][1].data_ptr() == base + block + KEYS.block_bytes(size)
    assert parallel["k"][1].data_ptr() == base + block + sum(
        spec.block_bytes(size) for spec in (KEYS, LATENT, KEYS.in_fp8())
    )
    delta, short, mamba = (arena.layers[NUMBER[name]] for name in ("delta rule", "short convolution", "mamba-1"))
    (spec,) = LAYERS["delta rule"]
    assert isinstance(spec, StateSpec)
    assert delta["matrix"][3].data_ptr() == base + 3 * slot + spec.tensors[0].num_bytes()
    assert short["conv"][0].data_ptr() == base + spec.slot_bytes
    assert mamba["conv"][1].data_ptr() == base + slot + spec.slot_bytes + WINDOW.slot_bytes
    assert layout.slot_bytes == sum(spec.slot_bytes for spec in layout.states)
    assert layout.block_bytes == sum(spec.block_bytes(64) for spec in layout.kv)


@pytest.mark.parametrize("kind", list(MoveKind))
def test_views_do_not_overlap(arena: ArenaBuffer, kind: MoveKind) -> None:
    own = views(arena, kind)
    for number, view in enumerate(own):
        for index in range(len(view)):
            view[index] = number * 10 + index
    for number, view in enumerate(own):
        for index in range(len(view)):
            assert (view[index] == torch.tensor(number * 10 + index).to(view.dtype)).all()


@pytest.mark.parametrize("kind", list(MoveKind))
def test_a_move_copies_one_unit_whole(arena: ArenaBuffer, kind: MoveKind) -> None:
    own = views(arena, kind)
    generator = torch.Generator().manual_seed(1)
    for view in own:
        view.copy_(torch.randn(view.shape, generator=generator))
    before, data = [view.clone() for view in own], arena.data.clone()
    layout, size, stride = arena.layout, arena.layout.slot_bytes, arena.layout.slot_stride_bytes
    if kind is MoveKind.BLOCK:  # up to the end of its last kernel block
        stride = layout.block_stride_bytes
        size = stride - stride // layout.kernel_blocks + layout.block_bytes // layout.kernel_blocks
        assert size == layout.block_bytes or layout.kernel_blocks > 1
    arena.move([Move(kind, 1, 3), Move(kind, 2, 1)])
    for start in (1 * stride, 3 * stride):
        data[start : start + size] = arena.data[start : start + size]
    assert torch.equal(arena.data, data), "more than the units was written"
    for old, view in zip(before, own, strict=True):
        assert torch.equal(view[3], old[1])
        assert torch.equal(view[1], old[2])
        rest = [i for i in range(len(view)) if i not in (1, 3)]
        assert torch.equal(view[rest], old[rest])


def test_layouts_of_one_kind() -> None:
    only_kv = ArenaBuffer(CacheLayout.create([(KEYS,), (), (LATENT,)]), 3, CpuPlatform())
    assert only_kv.states == [] and only_kv.num_slots == 0 and num_blocks(only_kv) == 3
    assert only_kv.layers[1] == {}
    only_states = ArenaBuffer(CacheLayout.create([LAYERS["mamba-1"], (WINDOW,)]), 3, CpuPlatform())
    assert only_states.block_views == [] and num_blocks(only_states) == 0 and only_states.num_slots == 3


def test_a_size_that_divides_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 128 or 48 tokens; none divides a block of 64"):
        CacheLayout.create([(KEYS,)], kernel_block_sizes=(128, 48))

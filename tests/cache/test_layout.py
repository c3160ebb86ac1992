"""Pages that hold either kind with little waste, for the shapes of real models."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkpoint.cache.layer_spec import keys_in_fp8
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.page_size import MAX_PADDING
from forkpoint.errors import ConfigError, UnsupportedModelError
from tests.cache.shapes import LATENT, REAL_LAYOUTS, layout_of
from tests.sched.harness import LAYOUTS, WINDOWED

KIB, MIB = 1024, 1 << 20
ALL = {**LAYOUTS, **REAL_LAYOUTS}
STORED = {f"{name} in tiers": layout.in_tiers() for name, layout in {**ALL, **WINDOWED}.items() if layout.windows}
AND_STORED = {**ALL, **STORED}


@pytest.mark.parametrize("layout", AND_STORED.values(), ids=list(AND_STORED))
def test_at_most_5_percent_of_a_page_is_padding(layout: CacheLayout) -> None:
    assert layout.padding <= MAX_PADDING
    blocks, slots = layout.blocks_per_page, layout.slots_per_page
    if layout.has_kv:
        assert layout.block_bytes <= layout.block_stride_bytes
        assert blocks * layout.block_stride_bytes == layout.page_bytes
    if layout.has_states:
        assert layout.slot_bytes <= layout.slot_stride_bytes
        assert slots * layout.slot_stride_bytes == layout.page_bytes


@pytest.mark.parametrize("layout", AND_STORED.values(), ids=list(AND_STORED))
def test_every_view_is_aligned(layout: CacheLayout) -> None:
    for stride in (layout.block_stride_bytes, layout.slot_stride_bytes):
        assert stride % 64 == 0


def test_bytes_of_published_shapes() -> None:
    """KV per token and state per sequence as published; Qwen3.5-9B: 32 KiB and 49.1 MiB."""
    layout = REAL_LAYOUTS["Qwen3.5-9B"]
    assert layout.block_bytes == 64 * 32 * KIB
    assert layout.slot_bytes / MIB == pytest.approx(49.1, abs=0.05)
    olmo = REAL_LAYOUTS["OLMo-Hybrid-7B"]
    assert olmo.block_bytes == 64 * 120 * KIB
    assert olmo.slot_bytes / MIB == pytest.approx(52.2, abs=0.05)


# Rows of the table in docs/models.md.
DOCUMENTED = {
    "Qwen3-Next": "Qwen3-Next-80B-A3B",
    "Qwen3.5, dense": "Qwen3.5-9B",
    "Qwen3.5, 3.6, 3.8, dense": "Qwen3.5-27B",
    "Qwen3.5, 3.6, experts": "Qwen3.5-35B-A3B",
    "Qwen3.8-Flash-Next": "Qwen3.8-Flash-Next",
    "OLMo Hybrid": "OLMo-Hybrid-7B",
    "LFM2, LFM2.5": "LFM2-1.2B",
    "LFM2-VL": "LFM2-1.2B",
    "LFM2, experts": "LFM2-8B-A1B",
    "LFM3": "LFM3-1.7B",
    "LaraMini": "Lara-4-Mini",
    "AliceAI": "AliceAI-80B-A3B",
    "Kimi-Linear": "Kimi-Linear-48B-A3B",
    "Ling-2.6": "Ling-2.6-flash",
    "Ling-3.0": "Ling-3.0-flash",
    "Ling-3.0 VL": "Ling-3.0-flash",
    "GLM-5.3": "GLM-5.3-Flash",
    "Jamba": "Jamba-1",
    "Falcon-Mamba": "FalconMamba-7B",
    "Mamba": "Mamba-2.8B",
    "Nemotron-3": "Nemotron-3-Nano-30B-A3B",
    "Nemotron 3 Omni": "Nemotron-3-Nano-30B-A3B",
    "Nemotron-H": "Nemotron-H-8B",
    "Falcon-H1": "Falcon-H1-0.5B",
    "Zamba2": "Zamba2-7B",
    "Bamba": "Bamba-9B",
    "Granite 4.0 H, experts": "Granite-4.0-H-Tiny",
    "Granite 4.0 H, dense": "Granite-4.0-H-350M",
    "Mamba-2": "Mamba2-2.7B",
    "Qwen3": "Qwen3-8B",
    "Llama": "Llama-3.1-8B",
    "Mistral": "Ministral-8B",
}


def test_bytes_in_the_docs() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "models.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    found = {row[0]: row[3:6] for row in rows if len(row) == 7}  # the page's other table has no bytes
    want = {}
    for label, name in DOCUMENTED.items():
        kv, slot = REAL_LAYOUTS[name].block_bytes // 64, REAL_LAYOUTS[name].checkpoint_bytes
        mib = f"{slot / MIB:.1f} MiB" if slot > MIB else f"{slot / MIB:.2f} MiB"
        want[label] = [f"{kv:,}", mib if slot else "none", f"{slot / kv:,.0f}" if kv and slot else ""]
    assert found == want


def test_pages_of_a_request() -> None:
    layout = LAYOUTS["several blocks a page"]
    per_page = layout.blocks_per_page
    assert layout.num_pages_for(64 * per_page, 0) == 1
    assert layout.num_pages_for(64 * per_page + 1, 1) == 3
    assert LAYOUTS["no keys and values"].num_pages_for(10_000, 3) == 3
    assert LAYOUTS["no states"].num_pages_for(65, 1) == 2


@pytest.mark.parametrize(("length", "usable"), [(1, 0), (64, 0), (65, 64), (128, 64), (129, 128)])
def test_one_token_is_always_computed(length: int, usable: int) -> None:
    assert LAYOUTS["one each"].usable_prefix(length) == usable


def test_a_model_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither"):
        layout_of([])


FP8 = {name: layout for name, layout in ALL.items() if all(spec.takes_fp8 for spec in layout.kv) and layout.has_kv}


@pytest.mark.parametrize("layout", FP8.values(), ids=list(FP8))
def test_keys_in_8_bits_halve_a_block_and_leave_the_rest_as_it_is(layout: CacheLayout) -> None:
    small = CacheLayout.create([keys_in_fp8(layer) for layer in layout.layers])
    num_scales = sum(64 * tensor.shape[0] for spec in layout.kv if not spec.window for tensor in spec.tensors)
    assert small.block_bytes == layout.block_bytes // 2 + 4 * num_scales
    assert small.slot_bytes == layout.slot_bytes and small.padding <= MAX_PADDING
    assert [spec.num_heads for spec in small.kv] == [spec.num_heads for spec in layout.kv]


def test_published_shape_in_8_bits() -> None:
    """Qwen3.5-9B: 8 layers, 4 heads of 256 each for keys and values: 16 KiB a token and a 64th of it for scales."""
    layout = CacheLayout.create([keys_in_fp8(layer) for layer in REAL_LAYOUTS["Qwen3.5-9B"].layers])
    assert layout.block_bytes == 64 * 16 * KIB * 65 // 64


def test_what_cannot_be_read_in_8_bits_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="attention over latent reads the model's dtype; give 'auto'"):
        keys_in_fp8((LATENT,))


def test_where_a_slot_is_small_every_boundary_has_a_state() -> None:
    hybrids = {name: layout for name, layout in REAL_LAYOUTS.items() if layout.has_states}
    small = [name for name, layout in hybrids.items() if layout.capture_interval(512) == 64]
    assert small == ["LFM2-1.2B", "LFM2-8B-A1B"]
    assert REAL_LAYOUTS["LFM2-1.2B"].capture_interval(0) == 0

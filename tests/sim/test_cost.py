"""The cost model: shapes against the engine's own formulas, and what a step takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from forkpoint.cache.layout import CacheLayout
from forkpoint.cli.model_shape import read_shape
from forkpoint.errors import ConfigError
from forkpoint.sim.cost import H200, CostModel, StepLoad
from forkpoint.sim.shape import KIMI_LINEAR, QWEN3_5_9B, QWEN3_5_35B, SHAPES, find_shape
from tests.cache.shapes import REAL_LAYOUTS
from tests.sim.driving import prefill_s

HUB_CONFIGS = Path(__file__).parents[1] / "models" / "hub_configs"


def sizes(layout: CacheLayout) -> tuple[int, ...]:
    pages = (layout.page_bytes, layout.blocks_per_page, layout.slots_per_page)
    return (*pages, layout.block_bytes, layout.slot_bytes, len(layout.kv), len(layout.states), len(layout.layers))


@pytest.mark.parametrize(
    ("shape", "name"),
    [(QWEN3_5_9B, "Qwen3.5-9B"), (QWEN3_5_35B, "Qwen3.5-35B-A3B"), (KIMI_LINEAR, "Kimi-Linear-48B-A3B")],
)
def test_presets_keep_what_the_published_shapes_keep(shape: object, name: str) -> None:
    assert sizes(find_shape(name.lower().removesuffix("-48b-a3b")).layout) == sizes(REAL_LAYOUTS[name])
    assert shape in SHAPES.values()


def test_a_model_folder_gives_the_preset(tmp_path: Path) -> None:
    """Up to the output gate of attention, which the engine's own count leaves out."""
    shape = read_shape(write_config(tmp_path / "model", SHAPE_9B))
    assert (sizes(shape.layout), shape.flops_per_pair) == (sizes(QWEN3_5_9B.layout), QWEN3_5_9B.flops_per_pair)
    assert shape.state_flops_per_token == QWEN3_5_9B.state_flops_per_token == 24 * 11 * 32 * 128 * 128
    assert shape.num_weights == pytest.approx(QWEN3_5_9B.num_weights, rel=0.03)


def test_active_and_total_weights() -> None:
    """The names of the models count their parameters: 35B with 3B active, 48B with 3B active."""
    for shape, total, active in ((QWEN3_5_9B, 9e9, 9e9), (QWEN3_5_35B, 35e9, 3e9), (KIMI_LINEAR, 48e9, 3e9)):
        everything = shape.num_weights + shape.num_expert_weights + 2 * shape.head_weights
        assert everything == pytest.approx(total, rel=0.06)
        assert shape.flops_per_token / 2 + shape.head_weights == pytest.approx(active, rel=0.15)
        all_bytes = 2 * (shape.num_weights + shape.num_expert_weights)
        assert shape.weight_bytes(1) <= shape.weight_bytes(100) <= all_bytes
        assert (shape.weight_bytes(1) < shape.weight_bytes(100)) == (shape.top_k > 0)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("granite-4.0-h-tiny", 7e9, 1e9), ("nemotron-3-super-120b-a12b", 120e9, 12e9)]
)
def test_experts_next_to_an_mlp_are_counted(name: str, total: float, active: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((HUB_CONFIGS / f"{name}.json").read_bytes())
    shape = read_shape(tmp_path)
    assert shape.num_weights + shape.num_expert_weights == pytest.approx(total, rel=0.1)
    assert shape.flops_per_token / 2 + shape.head_weights == pytest.approx(active, rel=0.5)


def test_more_work_takes_longer() -> None:
    model = CostModel(QWEN3_5_35B, H200)
    base = StepLoad(512, 512 * 256.0, 1, 8, 8000, 1, 9, 0)
    for name in StepLoad.__slots__:
        more = replace(base, **{name: 2 * getattr(base, name) + 100_000})
        assert model.step_s(more) > model.step_s(base), name


def test_a_step_with_drafts_costs_its_tokens_and_one_pass_over_the_states() -> None:
    """Compare with values by hand: 3 drafts in each of 8 rows are 32 tokens for products, head and attention, and 8
    states."""
    model, shape = CostModel(QWEN3_5_9B, H200), QWEN3_5_9B
    load = StepLoad(num_decodes=8, num_drafts=24, decode_kv_tokens=32 * 1000, num_sampled=32)
    parts, plain = model.parts(load), model.parts(replace(load, num_drafts=0, decode_kv_tokens=8000, num_sampled=8))
    assert parts.decode_states == plain.decode_states == 16 * shape.layout.slot_bytes / H200.bandwidth
    assert parts.decode_attention == 4 * plain.decode_attention and parts.moved == 4 * plain.moved
    assert parts.linear == plain.linear, "few tokens: the weights are read once"
    many = replace(load, num_decodes=128, num_drafts=384, num_sampled=512)
    flops = 512 * (shape.flops_per_token + 2 * shape.head_weights)
    assert model.parts(many).linear == pytest.approx(flops / H200.flops)
    sparse = CostModel(QWEN3_5_35B, H200)
    assert sparse.parts(load).linear > sparse.parts(replace(load, num_drafts=0)).linear, "more experts are met"


def test_attention_grows_with_the_context() -> None:
    model = CostModel(QWEN3_5_9B, H200)
    early, late = prefill_s(model, 0, 8192), prefill_s(model, 98_304, 106_496)
    assert 1.5 * early < late < 3 * early


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="kimi-linear"):
        find_shape("gpt")

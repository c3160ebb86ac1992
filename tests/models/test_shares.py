"""Every family cut into shares gives what it gives whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.models.layers import Unsummed
from forkpoint.models.registry import load_model
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.select import select_table
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.driver import Driver, Work
from tests.fp8_checkpoints import Layout, write_fp8
from tests.thread_ranks import on_each

PROMPT = torch.randint(2, 256, (80,), generator=torch.Generator().manual_seed(0)).tolist()
ALIKE = {
    "qwen3_5",
    "qwen3_5_multimodal",
    "qwen3_next_moe",
    "granite_hybrid",
    "lfm2",
    "bamba",
    "mamba2",
    "mamba",
    "llama",
}


def logits(folder: Path, ranks: Ranks, **options: Any) -> tuple[Tensor, int]:
    """Return the logits of a prompt in two chunks and two more tokens, and the bytes of a slot and a block together."""
    ops = select_table("auto", ranks.gathers or options.pop("deterministic", False), False)
    model = load_model(folder, ops=ops, ranks=ranks, **options)
    driver = Driver(model, num_blocks=8, num_slots=4)
    row = driver.row()
    found = [driver.prefill(row, PROMPT, [64])]
    found += [driver.run([Work(row, [token], decode=True)])[0] for token in (5, 7)]
    return torch.cat(found), driver.layout.block_stride_bytes + driver.layout.slot_stride_bytes


def check(folder: Path, size: int, **options: Any) -> None:
    whole, num_bytes = logits(folder, ALONE, deterministic=True, **options)
    for found, own_bytes in on_each(size, True, lambda ranks: logits(folder, ranks, **options)):
        assert torch.equal(found, whole)
        assert own_bytes < num_bytes
    sums = on_each(size, False, lambda ranks: logits(folder, ranks, **options)[0])
    for found in sums:
        assert torch.equal(found, sums[0])
        torch.testing.assert_close(found, whole, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - ALIKE))
def test_two_ranks(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family)
    check(tmp_path / "model", 2)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_next_moe", {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "vocab_size": 262}),  # 2 KV heads
        ("granite_hybrid", {}),  # 2 groups, of which each is normalised by two ranks
        ("bailing_moe_v2_5", {}),  # likewise
        ("kimi_linear", {"tie_word_embeddings": True}),
    ],
)
def test_four_ranks(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family, **config)
    check(tmp_path / "model", 4)


def test_a_sum_that_is_left_to_a_norm_is_nothing_before() -> None:
    left = Unsummed.of(torch.ones(2, 3))
    with pytest.raises(AssertionError, match="left to a norm"):
        left + 1
    assert left.own.sum() == 6


def test_what_cannot_be_divided_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3", num_attention_heads=6)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide the model's 6 query heads"):
        check(tmp_path / "model", 4)


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_next_moe", "block"), ("qwen3_5", "channel"), ("olmo_hybrid", "block")]
)
def test_fp8(family: str, layout: Layout, tmp_path: Path) -> None:
    """Heads that do not end with a block; columns that do."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256}
    sizes |= {"shared_expert_intermediate_size": 256, "linear_key_head_dim": 48, "linear_value_head_dim": 64}
    write_fp8(tmp_path / "model", family, layout, **sizes)
    check(tmp_path / "model", 2, dtype="float32")


def test_weights_that_are_put_in_fp8_as_they_load(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "linear_value_head_dim": 64}
    sizes |= {"linear_num_key_heads": 4}
    write_checkpoint(tmp_path / "model", "qwen3_5", **sizes)
    check(tmp_path / "model", 2, quantization="fp8")
    check(tmp_path / "model", 2, load_format="dummy", quantization="fp8")
    with pytest.raises(ConfigError, match="splits a matrix of 256 columns into pieces of 64, within blocks of 128"):
        check(tmp_path / "model", 4, quantization="fp8", load_format="dummy")

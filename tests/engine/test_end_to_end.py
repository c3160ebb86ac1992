"""Everything drawn together on real tiny models, against the same request alone with the cache off.

`FORKPOINT_EXAMPLES` is the number of examples. Example `i` is the same in every run of the test.
"""

from __future__ import annotations

import os

import pytest

from forkpoint.ops.cpu.build import load_operators
from tests.engine.compare import Oracle
from tests.engine.real import MORE_MODELS, PUBLISHED_MTP, SEEING, UNDEALT, ModelBank
from tests.engine.scenario import Example
from tests.engine.tally import Tally

# Together they draw everything in DRAWN, and each model with both kinds of operators and in both modes.
ENOUGH = (51, 68, 75, 78, 80, 82, 88, 97, 173, 176, 184, 219)
EXAMPLES = range(int(os.environ.get("FORKPOINT_EXAMPLES", "0"))) or ENOUGH
GROUPS = 3
DRAWN = [
    "hits",
    "moves",
    "preemptions",
    "resumed_from_cache",
    "evictions",
    "jumps",
    "replaced_tables",
    "stored",
    "restored",
    "restored_with_drafts",
    "restored_by_ranks",
    "restored_deterministic",
    "streamed",
    "read",
    "read_with_drafts",
    "read_by_ranks",
    "read_by_streams",
    "read_deterministic",
    "sunk",
    "copied",
    "aborted",
    "aborted_midway",
    "stop_strings",
    "stop_ids",
    "eos",
    "prompt_logprobs",
    "banned",
    "ends_of_thinking",
    "allowed",
    "deterministic",
    "fp8",
    "fp8_by_matrix",
    "four_bits",
    "four_bits_with_drafts",
    "fp8_keys",
    "fp8_keys_deterministic",
    "bfloat16_states",
    "states_recorded",
    "states_recorded_deterministic",
    "states_recorded_with_drafts",
    "async_scheduling",
    "ranks",
    "ranks_deterministic",
    "ranks_fp8_keys",
    "ranks_drafts",
    "ranks_under_rules",
    "ranks_preempted",
    "dealt",
    "dealt_deterministic",
    "dealt_hits",
    "dealt_moves",
    "dealt_preempted",
    "dealt_drafts",
    "dealt_fp8_keys",
    "failed",
    "ranks_failed",
    "scrubbed",
    "kept_prompt_end",
    "kept_decode",
    "kept_junction",
    "kept_interval",
    "kept_breakpoint",
    "hit_prompt_end",
    "hit_decode",
    "drafts_accepted",
    "drafts_rejected",
    "drafts_under_rules",
    "drafts_deterministic",
    "drafts_preempted",
    "drafts_of_siblings",
    "drafts_of_past_outputs",
    "drafts_by_mtp",
    "drafts_far_crossings",
]

# Layers with windows next to tiers: in all layers, and next to other layers.
WINDOW_SEEDS = {"mistral": [17, 27], "lfm3": [11]}
WINDOW_GROUPS = 6
DRAWN_WITH_WINDOWS = [
    "windows_restored",
    "windows_restored_deterministic",
    "windows_restored_with_drafts",
    "windows_restored_by_streams",
    "windows_read",
    "windows_read_deterministic",
    "windows_sunk",
    "evictions",
    "drafts_accepted",
    "fp8_keys",
    "async_scheduling",
]

IMAGE_SEEDS = {"qwen3_5": [3, 5], "nemotron_omni": [3, 17], "ling_vl": [2, 6, 15]}
DRAWN_WITH_IMAGES = [
    "images",
    "image_hits",
    "image_hits_inside",
    "images_preempted",
    "images_under_schemas",
    "image_drafts_by_mtp",
    "image_drafts_accepted",
    "image_ranks",
    "tower_runs",
    "deterministic",
    "fp8",
    "fp8_keys",
    "async_scheduling",
    "aborted_midway",
    "failed",
    "evictions",
    "jumps",
]


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.parametrize("seed", EXAMPLES)
def test_answers_are_those_of_the_request_alone(bank: ModelBank, oracle: Oracle, tally: Tally, seed: int) -> None:
    Example(bank, oracle, seed, tally).play(GROUPS)


DEALT = {"kimi_linear": (4, 4), "jamba": (4, 2)}  # models with more than two query heads


# Every family in deterministic mode (seed 5), and every second one as it comes. One of the runs is on several ranks
# that keep tokens in turn.
@pytest.mark.parametrize(("model", "seed"), [*((m, 5) for m in MORE_MODELS), *((m, 3) for m in [*MORE_MODELS][::2])])
def test_answers_of_further_families(bank: ModelBank, oracle: Oracle, model: str, seed: int) -> None:
    tally, dealt = Tally(), None
    if model not in UNDEALT and (seed == 5) == [*MORE_MODELS].index(model) % 2:
        dealt = DEALT.get(model, (2, 2))
    Example(bank, oracle, seed, tally, [model], dealt).play(2)
    assert tally.seen["hits"] and tally.seen["deterministic"] == (seed == 5)
    assert tally.seen["dealt"] == (dealt is not None)
    assert seed != 5 or tally.seen["drafts_rejected"]
    assert seed != 5 or model not in PUBLISHED_MTP or tally.seen["drafts_by_mtp"]


def test_answers_of_windows_in_tiers(bank: ModelBank, oracle: Oracle) -> None:
    """Each of these things happens to a model with windows in one of the examples."""
    tally = Tally()
    for model, seeds in WINDOW_SEEDS.items():
        for seed in seeds:
            Example(bank, oracle, seed, tally, [model]).play(WINDOW_GROUPS)
    missing = [name for name in DRAWN_WITH_WINDOWS if not tally.seen[name]]
    assert not missing, f"never happened: {missing}; counted: {dict(tally.seen)}"


def test_answers_to_images(bank: ModelBank, oracle: Oracle) -> None:
    """Images together with everything else: each of these things happens in one of the examples."""
    tally = Tally()
    for model, seeds in IMAGE_SEEDS.items():
        assert model in SEEING
        for seed in seeds:
            Example(bank, oracle, seed, tally, [model]).play(2)
    missing = [name for name in DRAWN_WITH_IMAGES if not tally.seen[name]]
    assert not missing, f"never happened: {missing}; counted: {dict(tally.seen)}"


def test_everything_was_drawn(tally: Tally) -> None:
    seen = tally.seen
    if seen["examples"] < len(ENOUGH):
        pytest.skip(f"{seen['examples']} examples ran; all of them together are looked at")
    missing = [name for name in DRAWN if not seen[name]]
    assert not missing, f"never happened: {missing}; counted: {dict(seen)}"
    assert seen["cpp"] or load_operators().module is None
    assert seen["flips"] <= 1 + seen["tokens"] // 2000, "too many ties: the tolerance hides something"

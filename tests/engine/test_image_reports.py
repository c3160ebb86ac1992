"""Bugs that users of other engines reported about images and hybrid models, each run again as a case here.

Reports about reading and fetching pictures are cases of `test_chat_images.py` and of `tests/server/test_fetcher.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint import LLM, SamplingParams
from forkpoint.cache import hashing
from tests.image_models import IMAGE, TOLERANCE, Part, Watched, picture, write_vision_checkpoint

RNG = np.random.default_rng(5)
INTRO, QUESTION, OTHER = (RNG.integers(2, IMAGE, count).tolist() for count in (100, 40, 70))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model, and transformers' instance of it."""
    pytest.importorskip("PIL.Image")
    place = tmp_path_factory.mktemp("seeing")
    return place, write_vision_checkpoint(place)


@pytest.fixture(scope="module")
def shared(folder: tuple[Path, Any]) -> Iterator[Watched]:
    found = Watched(*folder, checkpoint_interval=64)
    yield found
    found.llm.close()


@pytest.fixture
def watched(shared: Watched) -> Watched:
    """An engine whose caches are empty."""
    shared.llm.reset_prefix_cache()
    shared.forget_images()
    return shared


def cached_of(llm: LLM, prompts: list[list[int]]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    outputs = [llm.generate({"prompt_token_ids": each}, params, use_tqdm=False)[0] for each in prompts]
    return [output.num_cached_tokens for output in outputs]


def test_vllm_43587_a_tower_does_not_switch_caching_off_for_texts(folder: tuple[Path, Any], watched: Watched) -> None:
    prompts = [[*INTRO, *QUESTION], [*INTRO, *QUESTION, *OTHER], [*INTRO, *OTHER], [*INTRO, *QUESTION]]
    found = cached_of(watched.llm, prompts)
    watched.llm.reset_prefix_cache()
    alone = Watched(*folder, checkpoint_interval=64, language_model_only=True)
    assert found == cached_of(alone.llm, prompts) == [0, 128, 64, 128]
    alone.llm.close()


def test_omlx_637_images_that_are_added_turn_by_turn_keep_the_prefix(watched: Watched) -> None:
    """Each turn reuses all whole blocks of the turns before, and encodes its new image alone.

    vLLM reported 0 cached tokens for such conversations, too.
    """
    parts: list[Part] = [INTRO]
    before = 0
    for turn in range(4):
        parts += [picture(turn, 96 + 32 * turn, 160), QUESTION[: 20 + turn]]
        found = watched.ask(parts, 8)
        assert (found.cached, found.num_runs) == (before // 64 * 64, 1) and found.error <= TOLERANCE
        before = found.num_tokens + 7  # nothing has been computed after the last output
        parts.append(found.outputs)


@pytest.mark.parametrize("kept", [0, 1 << 15])
def test_vllm_40707_and_52583_large_images_do_not_hang(folder: tuple[Path, Any], kept: int) -> None:
    """Two images in one prompt. Each is larger than the encoder's budget, and neither starts where a block does."""
    options = {"max_num_batched_tokens": 64, "max_num_encoder_input_tokens": 50, "encoder_cache_size": kept}
    watched = Watched(*folder, max_num_seqs=1, **options)
    found = watched.ask([INTRO[:37], picture(1, 320, 448), [5, 6, 7], picture(2, 480, 640), QUESTION], 4)
    assert found.num_tokens > 480 and found.error <= TOLERANCE
    watched.llm.close()


def test_vllm_20261_another_image_under_the_same_text_is_no_hit(watched: Watched) -> None:
    for seed in range(3):
        found = watched.ask([INTRO, picture(seed, 320, 448), QUESTION])
        assert found.cached == (64 if seed else 0) and found.num_runs == 1 and found.error <= TOLERANCE


def test_lmcache_3301_and_4086_images_whose_hashes_collide_are_told_apart(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are compared as a whole. Here no hash depends on an image, so all blocks of the second prompt collide."""
    digest = hashing.blake2b
    monkeypatch.setattr(hashing, "blake2b", lambda data, **rest: digest(data[: hashing.BLOCK_BYTES], **rest))
    first = watched.ask([INTRO, picture(1, 320, 448), QUESTION])
    for parts, cached in (
        ([INTRO, picture(2, 320, 448), QUESTION], 64),
        ([INTRO, picture(1, 320, 448), QUESTION], 256),
        ([INTRO, picture(2, 320, 448), OTHER], 64),
    ):
        found = watched.ask(parts)
        assert found.cached == cached and found.error <= TOLERANCE
    assert first.cached == 0


def test_vllm_36708_an_image_at_another_place_of_a_block_is_no_hit(watched: Watched) -> None:
    """The ids of block 1 are equal: all of them stand for the image. Those of block 0 differ.

    `tests/runtime/test_row_images.py` compares blocks that differ by the place of an image alone.
    """
    image = picture(1, 320, 448)
    watched.ask([INTRO[:50], image, QUESTION])
    assert watched.ask([INTRO[:51], image, QUESTION]).cached == 0
    moved = watched.ask([INTRO[:49], image, QUESTION])
    assert moved.cached == 0 and moved.error <= TOLERANCE
    assert watched.ask([INTRO[:50], image, OTHER]).cached == 192


def test_vllm_45658_32469_31404_and_46354_lost_embeddings_are_computed_again(watched: Watched) -> None:
    """The runner has dropped what the scheduler counts as kept."""
    image = picture(1, 320, 448)
    watched.ask([INTRO, image, QUESTION])
    watched.runner._encoded._embeddings.clear()
    found = watched.ask([INTRO, image, OTHER])
    assert (found.cached, found.num_runs) == (192, 1) and found.error <= TOLERANCE


def test_vllm_10388_10403_and_48833_positions_at_the_edge_of_a_chunk(folder: tuple[Path, Any]) -> None:
    """Chunks end inside images, right before and right behind one, and the answer continues behind both."""
    watched = Watched(*folder, max_num_batched_tokens=64, max_num_seqs=1, checkpoint_interval=64)
    first = picture(1, 256, 256)  # 64 tokens
    for start in (64, 63, 100):
        parts = [RNG.integers(2, IMAGE, start - 1).tolist(), first, QUESTION, picture(2, 320, 448)]
        assert watched.ask(parts, 8).error <= TOLERANCE
    watched.llm.close()

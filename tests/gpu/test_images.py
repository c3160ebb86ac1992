"""Images on a CUDA device: the ids that a CPU makes in the same width, cold, after hits, together and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint import LLM, SamplingParams
from forkpoint.images import ImageSpan
from forkpoint.sched.draft_length import DraftLength
from tests.image_models import IMAGE, Watched, picture, prompt_of, write_vision_checkpoint
from tests.lfm2_vl_models import Lfm2VlOracle, lfm2_vl_prompt, write_lfm2_vl
from tests.ling_vl_models import ling_vl_oracle, write_ling_vl
from tests.nemotron_omni_models import nemotron_omni_oracle, write_nemotron_omni

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = 1e-3  # of the logits' standard deviation
RNG = np.random.default_rng(1)
INTRO, QUESTION, OTHER = (RNG.integers(2, IMAGE, count).tolist() for count in (100, 40, 70))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ON_CARD: dict[str, Any] = {"device": "cuda", "cpu_ops": "auto", "checkpoint_interval": 64, "enforce_eager": True}


@pytest.mark.parametrize("kind", ["dense", "moe", "lfm2_vl", "nemotron_omni", "ling_vl"])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The logits of every token that is computed: cold, then after hits behind, inside and before an image."""
    if kind == "lfm2_vl":
        theirs = write_lfm2_vl(tmp_path)
        watched = Watched(tmp_path, theirs, lfm2_vl_prompt, Lfm2VlOracle(tmp_path), **ON_CARD)
    elif kind == "nemotron_omni":
        watched = Watched(tmp_path, write_nemotron_omni(tmp_path), lfm2_vl_prompt, nemotron_omni_oracle, **ON_CARD)
    elif kind == "ling_vl":
        watched = Watched(tmp_path, write_ling_vl(tmp_path), prompt_of, ling_vl_oracle, **ON_CARD)
    else:
        watched = Watched(tmp_path, write_vision_checkpoint(tmp_path, moe=kind == "moe"), **ON_CARD)
    image = picture(1, 320, 448)
    asked = [
        watched.ask(parts, outputs)
        for parts, outputs in (
            ([INTRO, image, QUESTION], 40),
            ([INTRO, image, QUESTION], 1),
            ([INTRO, image, OTHER], 1),
            ([INTRO, picture(3, 320, 448), QUESTION], 1),
            ([INTRO, image, QUESTION, picture(2, 200, 130), OTHER], 1),
        )
    ]
    watched.llm.close()
    assert max(one.error for one in asked) <= TOLERANCE
    assert asked[0].cached == 0 and asked[1].cached > asked[2].cached > asked[3].cached > 0
    assert [one.num_runs for one in asked[:3]] == [1, 0, 0]


@pytest.mark.parametrize("drafts", [False, True])
def test_images_and_graphs(drafts: bool, tmp_path: Path) -> None:
    """Requests with and without images answer together as each does alone, bit for bit in deterministic mode."""
    write_vision_checkpoint(tmp_path, mtp=drafts)
    prompts = [prompt_of([INTRO, picture(seed, 64 * seed, 320), QUESTION[seed:]]) for seed in range(1, 6)]
    prompts += [{"prompt_token_ids": INTRO + OTHER}, {"prompt_token_ids": OTHER}]
    more: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}} if drafts else {}
    common = {"skip_tokenizer_init": True, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "device": "cuda"}
    with LLM(str(tmp_path), log_level="warning", max_num_seqs=8, deterministic=True, **common, **more) as llm:

        def ask(*asked: Any) -> list[tuple[int, ...]]:
            return [made.outputs[0].token_ids for made in llm.generate(list(asked), GREEDY, use_tqdm=False)]

        alone = []
        for prompt in prompts:
            alone += ask(prompt)
            assert llm.reset_prefix_cache()
        assert ask(*prompts) == alone
        assert ask(*prompts) == alone
        metrics = llm.get_metrics()
    assert metrics["num_replayed_steps"] > 0 and metrics["slot_bytes_copied"] == 0


def answers(folder: Path, rounds: Sequence[Sequence[Any]], drafts: bool, eager: bool) -> list[Any]:
    """Return ids and logprobs of prompts, round by round. Steps are launched if `eager`, and otherwise all recorded."""
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 192, "checkpoint_interval": 64}
    options |= {"skip_tokenizer_init": True, "log_level": "warning", "max_model_len": 2048, "device": "cuda"}
    if drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 28, deterministic=True, enforce_eager=eager, **options) as llm:
        runner: Any = llm._engine.core._runner  # type: ignore[attr-defined]
        place, parts = runner._encoded.place, list[tuple[ImageSpan, slice]]()
        runner._encoded.place = lambda images: (parts.extend(images.parts), place(images))
        found = [output for prompts in rounds for output in llm.generate(list(prompts), params, use_tqdm=False)]
        metrics = llm.get_metrics()
    assert metrics["num_replayed_steps"] == (0 if eager else metrics["num_steps"])
    assert any(tokens.stop < image.num_tokens for image, tokens in parts), "no chunk ended in an image"
    assert found[len(rounds[0])].num_cached_tokens == 192, "no hit inside an image"
    assert not drafts or metrics["num_draft_tokens"] > 0
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


@pytest.mark.parametrize("kind", ["dense", "moe", "lfm2_vl", "nemotron_omni", "ling_vl", "drafts"])
def test_recorded_steps_with_images(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits of launched steps, with chunks that end in an image and with several images in a step."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, name, most: most)  # whether drafts pay or not
    make = lfm2_vl_prompt if kind in ("lfm2_vl", "nemotron_omni") else prompt_of
    if kind == "lfm2_vl":
        write_lfm2_vl(tmp_path)
    elif kind == "nemotron_omni":
        write_nemotron_omni(tmp_path)
    elif kind == "ling_vl":
        write_ling_vl(tmp_path)
    else:
        write_vision_checkpoint(tmp_path, moe=kind == "moe", mtp=kind == "drafts")
    image, second, third = picture(1, 320, 448), picture(2, 200, 130), picture(3, 64, 96)
    cold = [[INTRO, image, QUESTION, second, OTHER], [OTHER, QUESTION], [second, third, OTHER], [image, QUESTION]]
    warm = [[INTRO, image, OTHER], [INTRO, picture(4, 320, 448), QUESTION], [INTRO, QUESTION]]
    rounds = [[make(parts) for parts in asked] for asked in (cold, warm)]
    launched, recorded = (answers(tmp_path, rounds, kind == "drafts", eager) for eager in (True, False))
    assert recorded == launched

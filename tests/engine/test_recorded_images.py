"""Recorded steps that compute tokens of images, under Triton's interpreter: the bits of launched steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from forkpoint import LLM, SamplingParams
from forkpoint.runtime.row_images import StepImages
from forkpoint.runtime.step_inputs import StepShape
from tests.image_models import IMAGE, Part, picture, prompt_of, write_vision_checkpoint
from tests.lfm2_vl_models import lfm2_vl_prompt, write_lfm2_vl
from tests.ling_vl_models import write_ling_vl
from tests.nemotron_omni_models import write_nemotron_omni
from tests.ops.triton_cases import ON_GPU, triton_ops
from tests.runtime.test_graphs import RecordingPlatform

pytestmark = pytest.mark.skipif(ON_GPU, reason="a graph that is run again needs the interpreter; see tests/gpu")

RNG = np.random.default_rng(1)
INTRO, QUESTION, OTHER = (RNG.integers(2, IMAGE, count).tolist() for count in (50, 9, 7))
BUDGET = 96  # tokens of a step
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=5)
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
WRITE: dict[str, Callable[[Path], Any]] = {
    "qwen3_5": partial(write_vision_checkpoint, mtp=True, **SMALL),
    "lfm2_vl": partial(write_lfm2_vl, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "nemotron_omni": partial(write_nemotron_omni, layers_block_type=["linear_attention", "full_attention"]),
    "ling_vl": write_ling_vl,
}


class TritonPlatform(RecordingPlatform):
    """The same with a GPU's operators."""

    def operators(self, cpu_ops: str) -> str:
        triton_ops()  # prepares the interpreter
        return "triton"


def shapes(num_drafts: int) -> tuple[StepShape, ...]:
    """Return a shape of steps that prefill, and one of steps that do not."""
    rows = 3
    decodes, verified = rows * (1 + num_drafts), rows if num_drafts else 0
    found = [StepShape(decodes, BUDGET, 4, verified), StepShape(decodes, 0, 0, verified), StepShape(rows, 0, 0)]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Answers:
    """What an engine answers, in two rounds, and what it did for that.

    `answers` are logprobs, which show every bit of the logits. `images` are those of each step that computes some of
    their tokens. `memory` is the arena, where the keys are.
    """

    answers: list[Any]
    cached: list[int]
    images: list[StepImages]
    counts: dict[str, float]
    num_replayed_steps: float
    memory: Tensor

    @classmethod
    def of(cls, folder: Path, rounds: Sequence[Sequence[Any]], recorded: bool, drafts: int) -> Answers:
        options: dict[str, Any] = {"enforce_eager": not recorded, "max_num_seqs": 3, "max_num_batched_tokens": BUDGET}
        if drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        options |= {"skip_tokenizer_init": True, "device": "cpu", "log_level": "error", "checkpoint_interval": 64}
        options |= {"deterministic": True, "kv_cache_memory_bytes": 1 << 22, "async_scheduling": drafts > 0}
        answers, cached = [], list[int]()
        with LLM(str(folder), max_model_len=512, **options) as llm:
            runner: Any = llm._engine.core._runner  # type: ignore[attr-defined]
            runner.arena.data.fill_(0)
            place, images = runner._encoded.place, list[StepImages]()
            runner._encoded.place = lambda found: (images.append(found), place(found))
            for prompts in rounds:
                for output in llm.generate(list(prompts), GREEDY, use_tqdm=False):
                    answers.append(output.outputs[0].logprobs)
                    cached.append(output.num_cached_tokens or 0)
            metrics = llm.get_metrics()
            names = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
            counts = {name: metrics[name] for name in names} | {"num_runs": runner._encoded.num_runs}
            images = [found for found in images if found.parts]
            return cls(answers, cached, images, counts, metrics["num_replayed_steps"], runner.arena.data[1:].clone())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafts"), [(family, 2 * (family == "qwen3_5")) for family in WRITE])
def test_recorded_steps_have_the_bits_of_launched_ones(
    family: str, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several images in a prompt, and in a step; chunks that end in one; texts beside them; hits inside an image."""
    WRITE[family](tmp_path)
    make = lfm2_vl_prompt if family in ("lfm2_vl", "nemotron_omni") else prompt_of
    image, second = picture(1, 160, 224), picture(2, 96, 64)  # the first is on both sides of a block's end

    def prompts(*asked: list[Part]) -> list[Any]:
        return [make(parts) for parts in asked]

    long: list[Part] = [INTRO, image, second, QUESTION, picture(3, 64, 160), OTHER]
    rounds = [
        prompts(long, [QUESTION, OTHER], [picture(4, 64, 64), second]),
        prompts([INTRO, image, OTHER], [OTHER, image], [INTRO, picture(5, 160, 224), QUESTION]),
    ]
    monkeypatch.setattr("forkpoint.worker.build.resolve_platform", lambda *_: TritonPlatform())
    monkeypatch.setattr("forkpoint.worker.build._try_kernels", lambda *_: None)
    monkeypatch.setattr("forkpoint.worker.build.graph_shapes", lambda *_, **options: shapes(drafts))
    launched, recorded = (Answers.of(tmp_path, rounds, recorded, drafts) for recorded in (False, True))
    assert launched.num_replayed_steps == 0 and recorded.num_replayed_steps == recorded.counts["num_steps"]
    assert recorded.answers == launched.answers
    assert recorded.cached == launched.cached and recorded.counts == launched.counts
    assert recorded.cached[3] == 64 and recorded.counts["num_runs"] == 5
    assert max(len(found.parts) for found in recorded.images) > 2
    cuts = [(tokens, image) for found in recorded.images for image, tokens in found.parts]
    assert any(tokens.stop < image.num_tokens for tokens, image in cuts), "no chunk ended in an image"
    assert bool(recorded.counts["num_draft_tokens"]) == (drafts > 0)
    assert recorded.memory.equal(launched.memory)

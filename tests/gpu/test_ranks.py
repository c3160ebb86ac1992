"""A model on two GPUs against the same model on one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_start import config_of
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

NUM_LAYERS = 4
LENGTHS = (1, 5, 80, 128, 300, 1500, 9000)  # tokens of prompts, of which each number has tiles and exchanges of its own
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20)


def scores(folder: Path, size: int, **options: Any) -> list[list[dict[int, float]]]:
    """Return the log-probabilities of the likeliest tokens, for each prompt and place."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    more: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "language_model_only": True}
    more |= {"max_model_len": 9216, "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 30, "log_level": "warning"}
    with LLM(str(folder), tensor_parallel_size=size, **more, **options) as llm:
        outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    assert not any(output.error for output in outputs), [output.error for output in outputs]
    return [[{k: v.logprob for k, v in place.items()} for place in output.logprobs or ()] for output in outputs]


@pytest.mark.parametrize(("quantization", "bound"), [("fp8", 0.4), (None, 0.2)])
def test_two_gpus_answer_as_one(quantization: str | None, bound: float, tmp_path: Path) -> None:
    """The likeliest tokens are the same, with nearly the same log-probabilities, while the answers are."""
    config = config_of("35b")
    text = config["text_config"]
    text |= {"num_hidden_layers": NUM_LAYERS, "layer_types": text["layer_types"][:NUM_LAYERS]}
    text |= {"num_experts": 8}  # all of which each token chooses, because rounding would change a choice
    (tmp_path / "config.json").write_text(json.dumps(config))
    one, two = (scores(tmp_path, size, quantization=quantization) for size in (1, 2))
    for length, ours, theirs in zip(LENGTHS, one, two, strict=True):
        for first, other in zip(ours, theirs, strict=True):
            both = first.keys() & other.keys()
            worst = max((abs(first[token] - other[token]) for token in both), default=math.inf)
            print(f"{quantization}, {length} tokens: {len(both)} of 20 the same, which differ by {worst:.3f}")
            assert len(both) >= 10 and worst < bound, f"{length} tokens: {len(both)} of 20 the same, {worst}"
            if max(first, key=first.__getitem__) != max(other, key=other.__getitem__):
                break

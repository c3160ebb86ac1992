"""Steps of the newest families on a card: recorded, launched one by one, after hits, and beside torch on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from tests.checkpoints import write_checkpoint

# A CPU takes the same way through the tests, to try them where there is no card. It records nothing.
DEVICE = os.environ.get("FORKPOINT_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device, or FORKPOINT_TEST_DEVICE=cpu"
)

NEW = ["bailing_moe_v2_5", "lara_mini", "alice_ai", "glm5_next", "qwen4_exp"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
LENGTHS = (1, 63, 64, 150, 700)
TOLERANCE = 1e-3  # of log-probabilities in fp32, as in test_engine.py


def prompt(length: int) -> list[int]:
    return torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@dataclass(frozen=True)
class Answers:
    """What an engine answers to all prompts together, to longer ones that hit their blocks, and to each alone."""

    cold: list[RequestOutput]
    warm: list[RequestOutput]
    alone: list[RequestOutput]
    num_replayed_steps: float

    @classmethod
    def of(cls, folder: Path, device: str, eager: bool, **options: Any) -> Answers:
        common = {"skip_tokenizer_init": True, "log_level": "warning", "max_model_len": 2048, "max_num_seqs": 4}
        common |= {"kv_cache_memory_bytes": 128 << 20, "dtype": "float32"}
        prompts = [prompt(length) for length in LENGTHS]
        with LLM(str(folder), device=device, enforce_eager=eager, **{**common, **options}) as llm:
            cold = llm.generate(prompts, GREEDY, use_tqdm=False)
            longer = [ids + tokens(output) + [5] * 70 for ids, output in zip(prompts, cold, strict=True)]
            warm = llm.generate(longer, GREEDY, use_tqdm=False)
            assert llm.reset_prefix_cache()
            alone = [llm.generate([ids], GREEDY, use_tqdm=False)[0] for ids in longer]
            return cls(cold, warm, alone, llm.get_metrics()["num_replayed_steps"])

    @property
    def ids(self) -> list[list[int]]:
        return [tokens(output) for output in (*self.cold, *self.warm)]

    @property
    def logprobs(self) -> list[float]:
        outputs = [output.outputs[0] for output in (*self.cold, *self.warm)]
        found = []
        for output in outputs:
            assert output.logprobs is not None
            found += [entry[i].logprob for entry, i in zip(output.logprobs, output.token_ids, strict=True)]
        return found


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.parametrize("family", NEW)
def test_graphs_hits_and_the_cpu_agree(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    launched = Answers.of(tmp_path, DEVICE, eager=True)
    assert cached(launched.alone) == [0] * len(LENGTHS)
    assert cached(launched.warm) == [(length + 23) // 64 * 64 for length in LENGTHS]
    assert [tokens(output) for output in launched.warm] == [tokens(output) for output in launched.alone]
    on_cpu = Answers.of(tmp_path, "cpu", eager=True, cpu_ops="torch")
    assert launched.ids == on_cpu.ids
    difference = torch.tensor(launched.logprobs) - torch.tensor(on_cpu.logprobs)
    assert difference.abs().max() <= TOLERANCE
    recorded = Answers.of(tmp_path, DEVICE, eager=False)
    assert recorded.ids == launched.ids and cached(recorded.warm) == cached(launched.warm)
    assert [tokens(output) for output in recorded.alone] == [tokens(output) for output in recorded.warm]
    assert launched.num_replayed_steps == 0 < recorded.num_replayed_steps or DEVICE == "cpu"

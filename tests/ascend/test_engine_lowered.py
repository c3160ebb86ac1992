"""The shipped model on a fake NPU, every Triton kernel as its Ascend IR on x86; run with `lowered_plugin`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.__version__ != "3.2.0":
    pytest.skip("needs triton-ascend's environment: make ascend", allow_module_level=True)

from forkpoint.engine.llm import LLM  # noqa: E402
from forkpoint.params import SamplingParams  # noqa: E402
from tests.ascend import fake_npu  # noqa: E402
from tests.ascend.execution import RAN  # noqa: E402

MODEL = Path(__file__).parents[2] / "demo_model"
TEXT = "My name is Nora. My lucky number is 42. " * 7
PROMPTS = [TEXT, TEXT + "What is", TEXT[:250]]


def _answers(device: str, **options: Any) -> list[tuple[int, tuple[int, ...], Any]]:
    numbers: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4}
    with LLM(str(MODEL), device=device, log_level="error", enforce_eager=True, **numbers, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
        return [(o.num_cached_tokens, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(autouse=True)
def _card(card: fake_npu.FakeModule) -> None: ...


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}


RECORDED = {"speculative_config": DRAFTS, "state_write_interval": 8}


FP8 = {"quantization": "fp8"}


@pytest.mark.parametrize(
    "options", [{}, {"speculative_config": DRAFTS}, RECORDED, FP8], ids=["", "drafts", "recorded", "fp8"]
)
def test_tokens_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    RAN.launches.clear()
    weights = FP8 if options == FP8 else {}
    there, here = _answers("npu", **options), _answers("cpu", cpu_ops="torch", **weights)
    assert ("_verify_kernel" in RAN.launches) == ("speculative_config" in options)  # of rows with drafts
    assert ("straight_record_kernel" in RAN.launches) == (options == RECORDED)
    assert len(RAN.launches) > 12
    assert [(hit, ids) for hit, ids, _ in there] == [(hit, ids) for hit, ids, _ in here]
    assert there[1][0] >= 64


def test_cached_and_uncached_are_the_same_bits() -> None:
    cached, alone = (_answers("npu", deterministic=True, enable_prefix_caching=on) for on in (True, False))
    assert cached[1][0] >= 64 and alone[1][0] == 0
    assert [rest for _, *rest in cached] == [rest for _, *rest in alone]

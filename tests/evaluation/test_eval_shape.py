"""Small models of the demo model's shape answer as transformers does, from a cold cache and from a warm one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from tests.checkpoints import write_checkpoint

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
WIDER: dict[str, Any] = {
    **SHAPE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
NUM_TOKENS = 8


@pytest.mark.parametrize("shape", [SHAPE, WIDER], ids=["heads of 32", "heads of 64"])
def test_answers_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """One pass of transformers over prompt and answer shows what greedy decoding says: each token is the likeliest."""
    oracle = write_checkpoint(tmp_path, "qwen3_next", **shape)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(2, 1024, (size,), generator=generator).tolist() for size in (130, 320, 451)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "log_level": "error", "max_model_len": 1024}
    sightings = []
    for cpu_ops in ("auto", "torch"):
        with LLM(str(tmp_path), cpu_ops=cpu_ops, **options) as llm:
            sightings += [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    for prompt, *found in zip(prompts, *sightings, strict=True):
        said = list(found[0].outputs[0].token_ids)
        with torch.no_grad():
            scores = oracle(torch.tensor([prompt + said])).logits[0, -NUM_TOKENS - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == said
        want = scores.max(-1).values.tolist()
        warm = (len(prompt) - 1) // 64 * 64
        assert [output.num_cached_tokens for output in found] == [0, warm, 0, warm]
        for output in found:
            answer = output.outputs[0]
            assert list(answer.token_ids) == said
            assert answer.logprobs is not None
            logprobs = [entry[token].logprob for token, entry in zip(said, answer.logprobs, strict=True)]
            assert logprobs == pytest.approx(want, abs=5e-3)

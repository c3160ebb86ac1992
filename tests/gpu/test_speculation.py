"""Drafts on a CUDA device: the ids and log-probabilities of plain decoding, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.gpu_9b.drafts import SyntheticDrafter, set_drafter
from evaluation.suite import DEMO_MODEL
from evaluation.tasks import make_training_dialogue
from forkpoint.engine.llm import LLM
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import StepPlan
from tests.checkpoints import write_checkpoint
from tests.engine.drafters import RandomDrafter
from tests.gpu.test_engine import prompt, start
from train.data import encode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 256
FAMILIES = ("qwen3_5", "qwen3_next_moe", "olmo_hybrid", "granite_hybrid", "lfm2")
FAMILIES += ("kimi_linear", "bailing_hybrid", "jamba", "falcon_mamba", "lfm3")
LENGTHS = (1, 40, 63, 130, 500)
CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
    {"min_p": 0.02, "top_k": 9, "logit_bias": {7: 2.0, 9: -3.0}},
]


def check(found: list[RequestOutput], want: list[RequestOutput]) -> None:
    """Ids first, then log-probabilities, told by the first that differs."""
    for i, (mine, other) in enumerate(zip(found, want, strict=True)):
        ours, theirs = mine.outputs[0], other.outputs[0]
        assert ours.error is None and ours.token_ids == theirs.token_ids, f"row {i}"
        for at, pair in enumerate(zip(ours.logprobs or (), theirs.logprobs or (), strict=True)):
            assert pair[0] == pair[1], f"row {i}, output {at}"


def ask(llm: LLM) -> list[RequestOutput]:
    prompts = [prompt(length, length) for length in LENGTHS]
    params = [SamplingParams(**{"max_tokens": 70, "seed": i, "ignore_eos": True, **mix}) for i, mix in enumerate(MIXES)]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family_name", FAMILIES)
def test_outputs_are_those_of_plain_decoding(family_name: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family_name)
    options = {"deterministic": True, "dtype": dtype}
    with start(tmp_path, **options) as llm:
        want = ask(llm)
        greedy = want[MIXES.index({"temperature": 0.0})].outputs[0].token_ids
    known = {tuple(prompt(63, 63)): greedy}
    for eager in (False, True):
        with start(tmp_path, **options, speculative_config=CONFIG, enforce_eager=eager) as llm:
            check(ask(llm), want)
            for drafter in (RandomDrafter(1, 3, VOCAB), SyntheticDrafter((0.9, 0.8, 0.7), VOCAB, known)):
                assert llm.reset_prefix_cache()
                set_drafter(llm, drafter)
                check(ask(llm), want)
            check(ask(llm), want)  # now they hit
            metrics = llm.get_metrics()
            assert metrics["num_accepted_tokens"] > 20 and metrics["slot_bytes_copied"] == 0
            assert (metrics["num_replayed_steps"] > metrics["num_steps"] // 2) != eager


def dialogues() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return [encode(make_training_dialogue(random.Random(i), 300), tokenizer)[0][: 120 + 9 * i] for i in range(8)]


def note_plans(llm: LLM) -> list[StepPlan]:
    runner: Any = llm._engine.core._runner
    plans, submit = list[StepPlan](), runner.submit
    runner.submit = lambda plan: [plans.append(plan), submit(plan)][1]
    return plans


def test_the_shipped_models_own_drafts_go_ahead_of_results() -> None:
    """Drafts that are right and wrong, greedy rows and random ones, in graphs and launched: bit for bit."""
    prompts = [{"prompt_token_ids": text} for text in dialogues()]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}]
    common: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(seed=i, **common, **kinds[i % 2]) for i in range(8)]
    with start(DEMO_MODEL, deterministic=True) as llm:
        want = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    for eager in (False, True):
        with start(DEMO_MODEL, deterministic=True, speculative_config=drafts, enforce_eager=eager) as llm:
            plans = note_plans(llm)
            for expected in want:
                check(llm.generate(prompts, params, use_tqdm=False), expected)
            metrics = llm.get_metrics()
        ahead = np.concatenate([plan.rows.optimistic for plan in plans])
        assert metrics["num_accepted_tokens"] > 400 and ahead.sum() > 60


def test_states_at_boundaries_in_reach_serve_the_next_turn() -> None:
    """In default mode, in fp32: greedy ids of both turns, and where the second one resumes."""
    params, found = SamplingParams(temperature=0.0, max_tokens=155, ignore_eos=True), list[Any]()
    for options in ({}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}):
        with start(DEMO_MODEL, dtype="float32", **options) as llm:
            plans = note_plans(llm)
            texts = dialogues()
            for _ in range(2):
                answers = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
                texts = [[*text, *answer.outputs[0].token_ids, 5] for text, answer in zip(texts, answers, strict=True)]
            found.append(([answer.num_cached_tokens for answer in answers], texts))
    saves = [plan.rows.optimistic & (np.diff(plan.rows.save_ptr) > 0) for plan in plans]
    assert found[0] == found[1] and np.concatenate(saves).sum() > 8


def test_states_in_bfloat16_and_default_mode(tmp_path: Path) -> None:
    """What is not deterministic agrees to rounding: in fp32, greedy ids."""
    write_checkpoint(tmp_path, "qwen3_5")
    with start(tmp_path) as llm:
        want = [output.outputs[0].token_ids for output in ask(llm)]
    with start(tmp_path, speculative_config={**CONFIG, "method": "cache"}) as llm:
        assert [output.outputs[0].token_ids for output in ask(llm)] == want
        assert [output.outputs[0].token_ids for output in ask(llm)] == want
    with start(tmp_path, mamba_ssm_cache_dtype="bfloat16", speculative_config=CONFIG) as llm:
        assert all(len(output.outputs[0].token_ids) == 70 for output in ask(llm))

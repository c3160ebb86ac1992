"""A stand-in for the held-out suite: the right answers are what a model with random weights says from a cold cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_model import make_random_model
from forkpoint.engine.llm import LLM
from forkpoint.params import FinishReason, SamplingParams
from tests.conftest import TINY
from tests.mtp_heads import add_mtp

SPEC = replace(TINY, max_position_embeddings=8192)
OPTIONS: dict[str, Any] = {"dtype": "float32", "log_level": "error", "device": "cpu", "num_threads": 1}
ANSWER = SamplingParams(temperature=0.0, max_tokens=12)
END_OF_MESSAGE = 257
WORDS = ("gate", "mill", "barn", "dock", "cave", "well", "tower", "bridge", "cellar", "attic", "kitchen", "chapel")


@dataclass(frozen=True)
class Example:
    task: str
    distance: str
    messages: tuple[dict[str, str], ...]
    answer: str


def write_model(folder: Path) -> str:
    """A model with random weights that ends an answer after a few tokens."""
    weights = make_random_model(folder, SPEC) / "model.safetensors"
    tensors = load_file(weights)
    noise = torch.randn(SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"][END_OF_MESSAGE] = 8 * noise / SPEC.hidden_size**0.5
    save_file(tensors, weights, metadata={"format": "pt"})
    add_mtp(folder)
    return str(folder)


def make_suite(model: str, count: int, *, least_turns: int = 2) -> list[Example]:
    """`count` dialogues of growing length; every assistant message is the model's own answer."""
    examples = []
    with LLM(model, enable_prefix_caching=False, **OPTIONS) as llm:
        for number in range(count):
            rng = random.Random(number)
            messages = [{"role": "system", "content": "Keep notes."}]
            for _ in range(least_turns + number):
                messages += _turn(llm, messages, rng, num_words=8)
            *messages, answer = messages + _turn(llm, messages, rng, num_words=1)
            task, distance = ("even", "odd")[number % 2], ("near", "far")[number // 2 % 2]
            examples.append(Example(task, distance, tuple(messages), answer["content"]))
    return examples


def _turn(llm: LLM, messages: list[dict[str, str]], rng: random.Random, num_words: int) -> list[dict[str, str]]:
    """A message whose answer the model ends, and that answer."""
    while True:
        said = {"role": "user", "content": " ".join(rng.choices(WORDS, k=num_words))}
        (output,) = llm.chat([*messages, said], ANSWER, use_tqdm=False)
        answer = output.outputs[0]
        if answer.finish_reason is FinishReason.STOP and answer.text.strip() == answer.text != "":
            return [said, {"role": "assistant", "content": answer.text}]

"""Faults are put in where they are said to be, are taken out again, and make the answers worse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluation import sensitivity
from evaluation.mutation_report import as_json, mutation_summary, mutation_table
from evaluation.mutations import MUTATIONS, ZERO, Served, find_served, mutated, round_to_steps, slot_bytes
from evaluation.question import Question, make_families
from evaluation.sensitivity import Marks, Sensitivity, measure_sensitivity
from evaluation.subject import Reply, Subject
from forkpoint.errors import ForkpointError
from tests.evaluation.eval_suite import OPTIONS, Example, make_suite, write_model

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
SALT = "mine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("eval-mutations"))


@pytest.fixture(scope="module")
def suite(model: str) -> list[Example]:
    return make_suite(model, 8, least_turns=3)


@pytest.fixture(scope="module")
def found(model: str, suite: list[Example]) -> Sensitivity:
    return measure_sensitivity(model, suite, seed=0, options=OPTIONS)


def test_the_sound_cache_answers_as_the_cold_one(found: Sensitivity) -> None:
    assert found.num_right == found.num_questions == 24


def test_faults_are_noticed(found: Sensitivity) -> None:
    assert found.problems == []
    results = {result.mutation.name: result for result in found.results}
    for name in ("one block early", "swapped", "lost"):
        assert results[name].lowers_accuracy and results[name].lowers_log_probability
        assert results[name].num_right < found.num_questions / 4
    assert results["8 bits, by value"].lowers_accuracy and results["8 bits, one scale"].lowers_accuracy
    assert results["4 bits, scale per tensor"].num_changed_tokens > 2 * results["8 bits, one scale"].num_changed_tokens
    assert found.control.num_changed_tokens == 0 and found.noticed_by(found.control) == []
    assert all("bits" in found.noticed_by(result) for result in found.results)


def test_continuations_tell_roundings_that_noise_does_not_explain(found: Sensitivity) -> None:
    results = {result.mutation.name: result for result in found.results}
    noise = {name: result.logprob_noise for name, result in results.items()}
    assert found.control.num_same_continuations == found.num_questions
    assert found.control.logprob_noise < 1e-4 < noise["16 bits, bfloat16"]
    assert noise["16 bits, bfloat16"] < noise["8 bits, one scale"] < noise["4 bits, scale per tensor"]
    assert results["8 bits, one scale"].continuations.p_value < 0.01


def test_a_continuation_that_the_sound_cache_changes_too_does_not_count() -> None:
    def marks(*texts: str) -> Marks:
        replies = [Reply(text, tuple(map(ord, text)), (-1.0,) * len(text), 64, 0) for text in texts]
        return Marks((True,) * len(texts), ((1,),) * len(texts), (-1.0,) * len(texts), tuple(replies))

    sound, again, spoilt = marks("ab", "ab", "ab", "ab"), marks("ab", "xb", "ab", "ax"), marks("ab", "xb", "ax", "ab")
    result = sensitivity._result(BY_NAME["8 bits, one scale"], sound, again, spoilt)
    assert result.num_same_continuations == 2
    assert (result.continuations.lost, result.continuations.gained) == (1, 1) and not result.lowers_continuations


def test_the_report(found: Sensitivity) -> None:
    lines = mutation_table(found).splitlines()
    assert [line[:25].strip() for line in lines[2:]] == ["none", "none, asked again", *BY_NAME]
    assert "accuracy" in lines[4] and mutation_summary(found)[-1].startswith("answers become wrong: one block early")
    assert json.loads(json.dumps(as_json(found)))["mutations"]["swapped"]["accuracy"]["num"] == found.num_questions


def test_a_fault_that_changes_nothing_is_told(model: str, suite: list[Example]) -> None:
    nothing = [
        dataclasses.replace(BY_NAME[name], name=f"nothing {name}", spoil=lambda arena, served: None)
        for name in ("swapped", "8 bits, one scale")
    ]
    found = measure_sensitivity(model, suite[:3], seed=0, options=OPTIONS, mutations=nothing)
    assert all(result.num_changed_tokens == 0 and result.log_probability.mean == 0.0 for result in found.results)
    answers, continuations = mutation_summary(found)[-2:]
    assert answers.startswith("FAILED nothing swapped: neither the accuracy nor the log-probability")
    assert continuations.startswith("FAILED nothing 8 bits, one scale: continuations do not part")


# --- where the faults are put


@dataclasses.dataclass
class Primed:
    """A subject that has seen the questions, with the slots that their next sightings read."""

    subject: Subject
    questions: Sequence[Question]

    def served(self) -> list[Served]:
        return [find_served(self.subject, question, SALT) for question in self.questions]

    def contents(self) -> list[Tensor]:
        return [slot_bytes(self.subject.arena, state.slot).clone() for state in self.served()]


@pytest.fixture(scope="module")
def primed(model: str, suite: list[Example]) -> Iterator[Primed]:
    with Subject(model, {**OPTIONS, **sensitivity.DENSE, "kv_cache_memory_bytes": 32 << 20}) as subject:
        families = make_families(subject, suite[:3])
        questions = [family[-1] for family in families]
        subject.ask([question.prompt for question in questions], 1, salts=[SALT] * len(questions))
        yield Primed(subject, questions)


def test_one_block_early_is_the_state_of_the_shorter_prompt(primed: Primed) -> None:
    """The earlier state is what a prompt that ends 64 tokens sooner leaves behind."""
    subject = primed.subject
    for question, state in zip(primed.questions, primed.served(), strict=True):
        usable = subject.layout.usable_prefix(question.num_prompt_tokens)
        cut = dataclasses.replace(question.prompt, token_ids=question.prompt.token_ids[: usable - 63])
        subject.ask([cut], 1, salts=["other"])
        shorter = find_served(subject, dataclasses.replace(question, prompt=cut), "other")
        earlier = slot_bytes(subject.arena, shorter.slot)
        tensors = [t.view(torch.float32) for t in (earlier, slot_bytes(subject.arena, state.earlier_slot))]
        assert torch.allclose(*tensors, atol=1e-4, rtol=1e-3)
        assert not torch.equal(earlier, slot_bytes(subject.arena, state.slot))


@pytest.mark.parametrize("name", BY_NAME)
def test_states_are_spoilt_and_put_back(primed: Primed, name: str) -> None:
    before = primed.contents()
    with mutated(primed.subject.arena, primed.served(), BY_NAME[name]):
        spoilt = primed.contents()
    assert all(not torch.equal(a, b) for a, b in zip(before, spoilt, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, primed.contents(), strict=True))


def test_swapped_states_are_those_of_others(primed: Primed) -> None:
    before = primed.contents()
    with mutated(primed.subject.arena, primed.served(), BY_NAME["swapped"]):
        spoilt = primed.contents()
    assert sorted(bytes(t.numpy()) for t in before) == sorted(bytes(t.numpy()) for t in spoilt)


def test_the_first_block_has_the_zero_state_before_it(primed: Primed) -> None:
    question = primed.questions[0]
    cut = dataclasses.replace(question.prompt, token_ids=question.prompt.token_ids[:70])
    assert find_served(primed.subject, dataclasses.replace(question, prompt=cut), SALT).earlier_slot == ZERO


def test_a_state_that_is_not_cached_is_told(primed: Primed) -> None:
    with pytest.raises(ForkpointError, match="0 are cached"):
        find_served(primed.subject, primed.questions[0], "never seen")


@pytest.mark.parametrize(("num_bits", "num_levels"), [(8, 255), (4, 15), (2, 3)])
def test_rounding_goes_to_the_nearest_step(num_bits: int, num_levels: int) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    rounded = values.clone()
    round_to_steps(rounded, values.abs().max(), num_bits)
    levels = torch.linspace(-1, 1, num_levels) * values.abs().max()
    nearest = (values[:, None] - levels).abs().min(1).values
    assert torch.allclose((rounded - values).abs(), nearest, atol=1e-6)
    zeros = torch.zeros(3)
    round_to_steps(zeros, zeros.max(), num_bits)
    assert zeros.tolist() == [0, 0, 0]


# --- what the log-probability of an answer is


def test_log_probabilities_are_those_of_the_answers_tokens(model: str, suite: list[Example]) -> None:
    """Against transformers, from the cache and without it."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with Subject(model, OPTIONS) as subject:
        questions = [family[-1] for family in make_families(subject, suite)]
        answers: list[Any] = [questions[(i + 1) % len(questions)].answer_ids for i in range(len(questions))]
        prompts = [question.prompt for question in questions]
        asked = [subject.log_probabilities(prompts, answers, ["", *[""] * (len(prompts) - 1)]) for _ in range(2)]
        assert subject.counters().num_cached_tokens > 0
    for question, answer, cold, warm in zip(questions, answers, *asked, strict=True):
        ids = torch.tensor([[*question.prompt.token_ids.tolist(), *answer]])
        with torch.no_grad():
            scores = oracle(ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        want = float(scores.gather(1, ids[0, -len(answer) :, None]).sum())
        assert cold == pytest.approx(want, abs=2e-3, rel=1e-3) and warm == pytest.approx(cold, abs=1e-3)

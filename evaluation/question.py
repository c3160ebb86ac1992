"""Prompts and the one right answer to each: the examples of a suite, and forks within their dialogues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from evaluation.subject import Subject
from forkpoint.engine.inputs import Prompt
from forkpoint.errors import ConfigError

FORK_DEPTHS = (0.3, 0.65)  # shares of a dialogue's messages at which it is asked too

Turn: TypeAlias = Mapping[str, str]


class SuiteExample(Protocol):
    """The part of a suite's example that is asked. `messages` end with the question."""

    @property
    def task(self) -> str: ...

    @property
    def distance(self) -> str: ...

    @property
    def messages(self) -> Sequence[Turn]: ...

    @property
    def answer(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt and its right answer. `answer_ids` include the end of the message.

    Forks ask at an earlier turn of an example's dialogue, whose own answer is the right one.
    """

    task: str
    distance: str
    prompt: Prompt
    answer: str
    answer_ids: tuple[int, ...]
    is_fork: bool

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)


Family: TypeAlias = tuple[Question, ...]  # the questions of one dialogue, the shallowest first


def make_families(subject: Subject, examples: Iterable[SuiteExample]) -> list[Family]:
    """Build the questions of each example's dialogue. Raises ConfigError if a prompt does not fit the model."""
    families = []
    for example in examples:
        messages = list(example.messages)
        questions = [make_question(subject, example)]
        for cut in fork_points([message["role"] for message in messages]):
            questions.append(_question(subject, example, messages[:cut], messages[cut]["content"], is_fork=True))
        families.append(tuple(sorted(questions, key=lambda question: question.num_prompt_tokens)))
    return families


def make_question(subject: Subject, example: SuiteExample) -> Question:
    """Build the example's own question. Raises ConfigError if its prompt does not fit the model."""
    return _question(subject, example, list(example.messages), example.answer, is_fork=False)


def fork_points(roles: Sequence[str]) -> list[int]:
    """Return the indices of assistant messages, near FORK_DEPTHS, whose prompts are the messages before them."""
    points = [i for i, role in enumerate(roles) if role == "assistant" and i and roles[i - 1] == "user"]
    wanted = (depth * len(roles) for depth in FORK_DEPTHS)
    return sorted({min(points, key=lambda point: abs(point - depth)) for depth in wanted}) if points else []


def _question(
    subject: Subject, example: SuiteExample, messages: Sequence[Turn], answer: str, *, is_fork: bool
) -> Question:
    prompt = subject.llm.render_chat(messages)
    whole = [*messages, {"role": "assistant", "content": answer}]
    ids = [int(i) for i in subject.llm.render_chat(whole, add_generation_prompt=False).token_ids]
    size = len(prompt.token_ids)
    if ids[:size] != prompt.token_ids.tolist():
        raise ConfigError(
            "the chat template writes an answer elsewhere than where its generation prompt ends; name one that does not"
        )
    answer_ids = _up_to_end(ids[size:], subject.inputs.eos_token_ids)
    return Question(example.task, example.distance, prompt, answer, answer_ids, is_fork)


def _up_to_end(ids: list[int], eos: frozenset[int]) -> tuple[int, ...]:
    """Return the answer's ids and the end of its message, without what the template adds after that."""
    end = next((i for i, token in enumerate(ids) if token in eos), len(ids) - 1)
    return tuple(ids[: end + 1])


def batches(families: Sequence[Family], max_tokens: int) -> list[list[Family]]:
    """Return batches of neighbouring families with at most `max_tokens` prompt tokens, but at least one family each."""
    out: list[list[Family]] = []
    room = 0
    for family in families:
        size = sum(question.num_prompt_tokens for question in family)
        if not out or size > room:
            out.append([])
            room = max_tokens
        out[-1].append(family)
        room -= size
    return out


def flat(families: Iterable[Family]) -> list[Question]:
    return [question for family in families for question in family]

"""The parts that all tasks share: a dialogue under construction, and the split of facts into training and held-out
ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar
from zlib import crc32

from evaluation.dialogue import Dialogue, Message, Scored

MARKS = b"0123456789.,:=?!'"  # each is a token of its own, as each word is with the space before it
TOKENS_PER_MARK, TOKENS_PER_MESSAGE = 1.2, 5.5  # a space before a digit is a token; role, special tokens, first word
HELD_OUT_SHARE = 8

T = TypeVar("T")


class Split(Enum):
    """The two splits. Every fact (a key and its value, a name and its first state) belongs to one of them."""

    TRAINING = False
    HELD_OUT = True

    def has(self, key: str, value: str) -> bool:
        return (crc32(f"{key}={value}".encode()) % HELD_OUT_SHARE == 0) is self.value


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Return what `rng.choice` returns, in a third of the time."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T], count: int) -> list[T]:
    """Return `count` distinct items, or all if there are fewer, in random order."""
    return rng.sample(items, min(count, len(items)))


class DialogueBuilder:
    """Adds turns until an estimate of the tokens reaches `num_tokens`."""

    def __init__(self, task: str, num_tokens: int, system: str = "") -> None:
        self.messages: list[Message] = []
        self._task = task
        self._num_tokens = num_tokens
        self._scored: list[Scored] = []
        self._room = float(num_tokens)
        if system:
            self._add("system", system)

    @property
    def is_full(self) -> bool:
        return self._room <= 0

    @property
    def next_index(self) -> int:
        """Index of the user message that the next turn adds."""
        return len(self.messages)

    def tell(self, text: str, reply: str) -> int:
        """Add a turn whose reply is not scored. Return the index of the user's message."""
        self._add("user", text)
        self._add("assistant", reply)
        return len(self.messages) - 2

    def ask(self, text: str, answer: str, source: int, kind: str) -> int:
        """Add a turn whose reply is the one right answer. Return the index of the answer."""
        self._add("user", text)
        self._add("assistant", answer)
        index = len(self.messages) - 1
        self._scored.append(Scored(index, source, kind))
        return index

    def finish(self) -> Dialogue:
        return Dialogue(self._task, tuple(self.messages), tuple(self._scored))

    def _add(self, role: str, content: str) -> None:
        self.messages.append(Message(role, content))
        self._room -= _num_tokens(content)


def _num_tokens(content: str) -> float:
    """Estimate the tokens of a message from quickly counted features. Over a dialogue the error is a few per cent."""
    marks = len(content) - len(content.encode().translate(None, MARKS))
    return TOKENS_PER_MESSAGE + content.count(" ") + TOKENS_PER_MARK * marks


class Thread(Protocol):
    """One strand of a dialogue. Several may be interleaved."""

    def turn(self, dialogue: DialogueBuilder) -> None:
        """Add one turn."""


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """The contents of a system message: its text, facts (key to value) and replies (trigger to reply)."""

    text: str = ""
    noun: str = "code"
    facts: dict[str, str] = field(default_factory=dict)
    replies: dict[str, str] = field(default_factory=dict)

    def without_facts(self) -> SystemPrompt:
        return SystemPrompt(self.text, self.noun, {}, self.replies)


@dataclass(frozen=True, slots=True)
class Setting:
    """The sources from which a task may draw its threads."""

    rng: random.Random
    num_tokens: int
    split: Split
    system: SystemPrompt


@dataclass(frozen=True, slots=True)
class Scene:
    """A system prompt, and the threads of a dialogue under it, without small talk."""

    system: SystemPrompt
    threads: tuple[Thread, ...]

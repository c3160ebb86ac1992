"""Things that have a state, and small moves that change it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from evaluation.tasks.builder import DialogueBuilder, Split, pick
from evaluation.tasks.words import NAMES

WAITING = "OK."


class Machine(Protocol):
    """A kind of tracked thing. A state is the text of its answer, word for word. `kind` is that of `Scored`."""

    @property
    def kind(self) -> str: ...

    def start(self, rng: random.Random) -> str:
        """Return a first state."""

    def opening(self, name: str, state: str) -> str:
        """Return the sentence that tells the first state."""

    def move(self, rng: random.Random, name: str, state: str) -> tuple[str, str]:
        """Return a sentence that tells one move, and the state after it."""

    def question(self, name: str) -> str:
        """Return the question for the state."""


@dataclass(frozen=True, slots=True)
class TableMachine:
    """A machine with few states. `moves` pairs a sentence with the change of the state's index."""

    states: tuple[str, ...]
    first: str
    asks: str
    moves: tuple[tuple[str, Callable[[int], int]], ...]
    kind: str = "state"

    def start(self, rng: random.Random) -> str:
        return pick(rng, self.states)

    def opening(self, name: str, state: str) -> str:
        return self.first.format(name=name, state=state)

    def move(self, rng: random.Random, name: str, state: str) -> tuple[str, str]:
        sentence, change = pick(rng, self.moves)
        return sentence.format(name=name), self.states[change(self.states.index(state))]

    def question(self, name: str) -> str:
        return self.asks.format(name=name)


class TrackingThread:
    """Follows one machine for each name. After each move it says the state, or waits for a question.

    If it waits, at most `patience` moves come before a question.
    """

    def __init__(
        self, rng: random.Random, split: Split, machine: Machine, num_names: int, *, waits: bool, patience: int
    ) -> None:
        self._rng, self._split, self._machine = rng, split, machine
        self._waits, self._patience = waits, patience
        self._num_unopened = num_names
        self._names: list[str] = []
        self._state: dict[str, str] = {}
        self._source: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    def turn(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if self._num_unopened and (not self._names or rng.random() < 0.3):
            self._open(dialogue)
            return
        name = pick(rng, self._names)
        pending = self._pending[name]
        if rng.random() < 0.12 or (self._waits and pending and (pending >= self._patience or rng.random() < 0.4)):
            self._source[name] = self._ask(dialogue, self._machine.question(name), name, self._source[name])
            self._pending[name] = 0
        else:
            self._move(dialogue, name)

    def moved(self, least_moves: int) -> list[tuple[str, str]]:
        """Return question and answer for every name with at least this many moves since its state was said."""
        names = [name for name in self._names if self._pending[name] >= least_moves]
        return [(self._machine.question(name), self._state[name]) for name in names]

    def _open(self, dialogue: DialogueBuilder) -> None:
        name, state, text = self._draw()
        self._num_unopened -= 1
        self._names.append(name)
        self._state[name], self._pending[name] = state, 0
        if self._waits:
            self._source[name] = dialogue.tell(f"{text} Wait until I ask.", WAITING)
        else:
            self._source[name] = self._ask(dialogue, f"{text} Answer after each move.", name, dialogue.next_index)

    def _ask(self, dialogue: DialogueBuilder, text: str, name: str, source: int) -> int:
        return dialogue.ask(text, self._state[name], source, self._machine.kind)

    def _draw(self) -> tuple[str, str, str]:
        """Draw a new name, its first state and the sentence that tells the state, all of this split."""
        while True:
            name, state = pick(self._rng, NAMES), self._machine.start(self._rng)
            text = self._machine.opening(name, state)
            if name not in self._state and self._split.has(name, text):
                return name, state, text

    def _move(self, dialogue: DialogueBuilder, name: str) -> None:
        text, state = self._machine.move(self._rng, name, self._state[name])
        if not self._waits and self._rng.random() < 0.2:
            more, state = self._machine.move(self._rng, name, state)
            text = f"{text} {more}"
        self._state[name] = state
        if self._waits:
            self._pending[name] += 1
            self._source[name] = dialogue.tell(text, WAITING)
        else:
            self._source[name] = self._ask(dialogue, text, name, dialogue.next_index)

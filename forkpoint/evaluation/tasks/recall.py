"""Facts told and asked for: plain recall, and corrections of which the newest counts."""

from __future__ import annotations

import random

from forkpoint.evaluation.tasks.builder import DialogueBuilder, Scene, Setting, Split, pick, shuffled
from forkpoint.evaluation.tasks.style import PLAIN, Style
from forkpoint.evaluation.tasks.words import ANIMALS, COLORS, KEYS, LETTERS, NOUNS

FACTS = (
    "The {noun} for {key} is {value}.",
    "Remember {key}: {value}.",
    "For {key} use {value}.",
    "The {noun} of {key} is {value}.",
    "Please note {key}: {value}.",
)
CORRECTIONS = (
    "Correction: the {noun} for {key} is now {value}.",
    "Change {key} to {value}.",
    "I was wrong: the {noun} for {key} is {value}.",
    "From now on {key} has the {noun} {value}.",
)
QUESTIONS = (
    "What is the {noun} for {key}?",
    "Tell me the {noun} of {key}.",
    "Which {noun} has {key}?",
    "Do you remember {key}?",
    "And {key}?",
)
NOTED, UPDATED, UNKNOWN = "Noted.", "Updated.", "I do not know."
REPEAT, UNTOLD = 0.25, 0.03  # shares of questions: asked before; about a key never told


def draw_value(rng: random.Random, key: str, split: Split) -> str:
    """A value that may stand with the key in this split."""
    while True:
        value = _any_value(rng)
        if split.has(key, value):
            return value


def _any_value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return str(1000 + int(rng.random() * 9000))
    if kind < 0.45:
        return str(100 + int(rng.random() * 900))
    if kind < 0.65:
        return f"{pick(rng, COLORS)} {pick(rng, ANIMALS)}"
    if kind < 0.82:
        return f"{pick(rng, ANIMALS)} {10 + int(rng.random() * 90)}"
    return f"{pick(rng, LETTERS)}{pick(rng, LETTERS)}{10 + int(rng.random() * 90)}"


class RecallThread:
    """Tells facts, corrects some, asks for them; each question has one answer, the newest value of its key."""

    def __init__(
        self, setting: Setting, *, corrections: float = 0.0, num_keys: int | None = None, style: Style = PLAIN
    ) -> None:
        rng = setting.rng
        self._rng, self._split, self._style = rng, setting.split, style
        self._noun = setting.system.noun if setting.system.facts else pick(rng, NOUNS)
        self._corrections = corrections
        self._told_share = 0.25 + 0.5 * rng.random()
        self._values: dict[str, str] = dict(setting.system.facts)
        self._source = dict.fromkeys(self._values, 0)
        self._unasked = list(self._values)
        self._known = list(self._values)
        if num_keys is None:
            num_keys = 3 + int((0.2 + rng.random()) * setting.num_tokens / 90)
        unused = [key for key in KEYS if key not in self._values] if self._values else KEYS
        self._new = shuffled(rng, unused, num_keys)
        self._untold = self._new.pop() if len(self._new) > 3 and not self._known else None

    def turn(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if self._new and (not self._known or rng.random() < self._told_share):
            self._tell(dialogue)
        elif self._corrections and rng.random() < self._corrections:
            self._correct(dialogue)
        else:
            self._ask(dialogue)

    def _tell(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        count = 1 if rng.random() < 0.5 else 2 + int(rng.random() * 4)
        sentences = []
        for _ in range(min(count, len(self._new))):
            key = self._new.pop()
            sentences.append(self._state(FACTS, key))
            self._known.append(key)
            self._unasked.append(key)
            self._source[key] = dialogue.next_index
        dialogue.tell(" ".join(sentences), NOTED)

    def _correct(self, dialogue: DialogueBuilder) -> None:
        key = pick(self._rng, self._known)
        self._source[key] = dialogue.next_index
        if key not in self._unasked:
            self._unasked.append(key)
        dialogue.tell(self._state(CORRECTIONS, key), UPDATED)

    def _ask(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if self._untold is not None and rng.random() < UNTOLD:
            dialogue.tell(pick(rng, QUESTIONS[:3]).format(noun=self._noun, key=self._untold), UNKNOWN)
            return
        key = self._draw_question()
        text = pick(rng, QUESTIONS).format(noun=self._noun, key=key)
        answer = self._style.apply(self._values[key])
        self._source[key] = dialogue.ask(text, answer, self._source[key])

    def _draw_question(self) -> str:
        unasked, rng = self._unasked, self._rng
        if not unasked or rng.random() < REPEAT:
            key = pick(rng, self._known)
            if key in unasked:
                unasked.remove(key)
            return key
        index = int(rng.random() * len(unasked))
        unasked[index], unasked[-1] = unasked[-1], unasked[index]
        return unasked.pop()

    def _state(self, templates: tuple[str, ...], key: str) -> str:
        value = draw_value(self._rng, key, self._split)
        while value == self._values.get(key):
            value = draw_value(self._rng, key, self._split)
        self._values[key] = value
        return pick(self._rng, templates).format(noun=self._noun, key=key, value=value)


def recall(setting: Setting) -> Scene:
    return Scene(setting.system, (RecallThread(setting),))


def correction(setting: Setting) -> Scene:
    rng = setting.rng
    num_keys = 2 + int(rng.random() * (2 + setting.num_tokens / 250))
    return Scene(setting.system, (RecallThread(setting, corrections=0.3 + 0.3 * rng.random(), num_keys=num_keys),))

"""The subjects of facts: codes of places, codes of made-up words, and the user."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evaluation.tasks.builder import Split, pick
from evaluation.tasks.words import ANIMALS, COLORS, KEYS, LETTERS, NAMES

FACTS = (
    "The {noun} for {key} is {value}.",
    "The {noun} of {key} is {value}.",
    "The {noun} for the {key} is {value}.",
    "Remember that the {noun} for {key} is {value}.",
    "Remember {key}: {value}.",
    "Please note {key}: {value}.",
    "For {key} use {value}.",
)
CORRECTIONS = (
    "Correction: the {noun} for {key} is now {value}.",
    "The {noun} for {key} has changed to {value}.",
    "Change {key} to {value}.",
    "I was wrong: the {noun} for {key} is {value}.",
    "From now on the {noun} for {key} is {value}.",
)
QUESTIONS = (
    "What is the {noun} for {key}?",
    "What is the {noun} of {key}?",
    "What is the {noun} for the {key}?",
    "Tell me the {noun} of {key}.",
    "Please tell me the {noun} for {key}.",
    "Which {noun} has {key}?",
    "What was the {noun} for {key}?",
    "Do you remember the {noun} for {key}?",
    "And {key}?",
)
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


class Topic(Protocol):
    """The keys of a topic, their possible values, and the sentences that tell, correct and ask for them. `kind` is that
    of `Scored`."""

    @property
    def kind(self) -> str: ...

    def keys(self, rng: random.Random, count: int, without: Mapping[str, str]) -> list[str]:
        """Return at most `count` keys in random order, none of `without`."""

    def value(self, rng: random.Random, key: str, split: Split) -> str:
        """Return a value that may belong to the key in this split."""

    def fact(self, rng: random.Random, key: str, value: str) -> str: ...

    def correction(self, rng: random.Random, key: str, value: str) -> str: ...

    def question(self, rng: random.Random, key: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Codes:
    """Short codes for places. `noun` is the word for such a code."""

    noun: str
    kind: str = "fact"

    def keys(self, rng: random.Random, count: int, without: Mapping[str, str]) -> list[str]:
        unused = [key for key in KEYS if key not in without] if without else KEYS
        return rng.sample(unused, min(count, len(unused)))

    def value(self, rng: random.Random, key: str, split: Split) -> str:
        return draw_value(rng, key, split)

    def fact(self, rng: random.Random, key: str, value: str) -> str:
        return pick(rng, FACTS).format(noun=self.noun, key=key, value=value)

    def correction(self, rng: random.Random, key: str, value: str) -> str:
        return pick(rng, CORRECTIONS).format(noun=self.noun, key=key, value=value)

    def question(self, rng: random.Random, key: str) -> str:
        return pick(rng, QUESTIONS).format(noun=self.noun, key=key)


@dataclass(frozen=True, slots=True)
class MadeUp(Codes):
    """Short codes for made-up words, which may also be values."""

    def keys(self, rng: random.Random, count: int, without: Mapping[str, str]) -> list[str]:
        made = {_made_up(rng) for _ in range(count)}
        return [key for key in sorted(made) if key not in without]

    def value(self, rng: random.Random, key: str, split: Split) -> str:
        value = _made_up(rng) if rng.random() < 0.3 else draw_value(rng, key, split)
        return value if split.has(key, value) else self.value(rng, key, split)


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of the user: the sentences that tell, correct and ask for it, and its possible values (None: a
    number)."""

    fact: str
    correction: str
    question: str
    values: Sequence[str] | None


def _favorite(thing: str, values: Sequence[str] | None) -> Attribute:
    return Attribute(
        f"My {thing} is {{value}}.", f"Actually my {thing} is {{value}} now.", f"What is my {thing}?", values
    )


PROFILE: Mapping[str, Attribute] = {
    "name": Attribute("My name is {value}.", "Please call me {value} from now on.", "What is my name?", NAMES),
    "friend": Attribute(
        "My best friend is {value}.", "{value} is my best friend now.", "Who is my best friend?", NAMES
    ),
    "age": Attribute("I am {value} years old.", "No, I am {value} years old.", "How old am I?", None),
    "pet": Attribute("I have a pet {value}.", "Now I have a {value} as a pet.", "Which pet do I have?", ANIMALS),
    "color": _favorite("favorite color", COLORS),
    "animal": _favorite("favorite animal", ANIMALS),
    "number": _favorite("lucky number", None),
    "room": _favorite("room number", None),
    "car": Attribute("I drive a {value} car.", "My new car is {value}.", "Which color does my car have?", COLORS),
    "boss": Attribute("I work for {value}.", "Now I work for {value}.", "Who do I work for?", NAMES),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Facts that users tell about themselves."""

    kind: str = "profile"

    def keys(self, rng: random.Random, count: int, without: Mapping[str, str]) -> list[str]:
        unused = [key for key in PROFILE if key not in without]
        return rng.sample(unused, min(count, len(unused)))

    def value(self, rng: random.Random, key: str, split: Split) -> str:
        values = PROFILE[key].values
        while True:
            value = pick(rng, values) if values else str(10 + int(rng.random() * 90))
            if split.has(key, value):
                return value

    def fact(self, rng: random.Random, key: str, value: str) -> str:
        return PROFILE[key].fact.format(value=value)

    def correction(self, rng: random.Random, key: str, value: str) -> str:
        return PROFILE[key].correction.format(value=value)

    def question(self, rng: random.Random, key: str) -> str:
        return PROFILE[key].question


def draw_value(rng: random.Random, key: str, split: Split) -> str:
    """Draw a code that may belong to the key in this split."""
    while True:
        value = _code(rng)
        if split.has(key, value):
            return value


def _code(rng: random.Random) -> str:
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


def _made_up(rng: random.Random) -> str:
    syllables = [pick(rng, CONSONANTS) + pick(rng, VOWELS) for _ in range(2 + int(rng.random() * 2))]
    return "".join(syllables) + (pick(rng, CONSONANTS) if rng.random() < 0.5 else "")

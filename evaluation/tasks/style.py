"""The style of answers that a system prompt may demand."""

from __future__ import annotations

import random
from dataclasses import dataclass

from evaluation.tasks.builder import pick
from evaluation.tasks.words import AFFIXES


@dataclass(frozen=True, slots=True)
class Style:
    """A style. `rule` is the sentence of the system prompt. `form` is an answer, with `{}` in place of the value."""

    rule: str = ""
    form: str = "{}"

    def apply(self, value: str) -> str:
        return self.form.format(value)


PLAIN = Style()
FIXED = (
    Style("Put each answer about a key in brackets.", "[{}]"),
    Style("Put a star before each answer about a key.", "* {}"),
    Style("Say each answer about a key twice.", "{0}, {0}"),
)


def draw_style(rng: random.Random) -> Style:
    kind = rng.random()
    if kind < 0.3:
        word = pick(rng, AFFIXES)
        return Style(f"End each answer about a key with the word {word}.", f"{{}} {word}")
    if kind < 0.6:
        word = pick(rng, AFFIXES)
        return Style(f"Begin each answer about a key with the word {word}.", f"{word} {{}}")
    return pick(rng, FIXED)

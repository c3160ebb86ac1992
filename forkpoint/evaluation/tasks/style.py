"""How answers are to be written, if a system prompt says so."""

from __future__ import annotations

import random
from dataclasses import dataclass

from forkpoint.evaluation.tasks.builder import pick
from forkpoint.evaluation.tasks.words import ENDINGS


@dataclass(frozen=True, slots=True)
class Style:
    """`rule` is the sentence of the system prompt; answers are `prefix`, the value, in capitals or not, `suffix`."""

    rule: str = ""
    prefix: str = ""
    suffix: str = ""
    capitals: bool = False

    def apply(self, value: str) -> str:
        return f"{self.prefix}{value.upper() if self.capitals else value}{self.suffix}"


PLAIN = Style()


def draw_style(rng: random.Random) -> Style:
    kind = rng.random()
    if kind < 0.35:
        word = pick(rng, ENDINGS)
        return Style(f"End each answer about a key with the word {word}.", suffix=f" {word}")
    if kind < 0.7:
        word = pick(rng, ENDINGS)
        return Style(f"Begin each answer about a key with the word {word}.", prefix=f"{word} ")
    return Style("Write each answer about a key in capitals.", capitals=True)

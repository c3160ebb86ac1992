"""A short conversation under a long system prompt, and what is right to answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from forkpoint.evaluation.tasks.builder import Split, SystemPrompt
from forkpoint.evaluation.tasks.system import long_system_prompt

SYSTEM_TOKENS = 500
STORY = (
    "Let me tell you about my day. We sat by the window and had {drink}. Nobody wanted to go home yet. "
    "After that I read the paper and wrote a few letters. Later we cooked {food} for everybody. "
    "The {food} was a bit too salty, but we laughed about it."
)
STORIES = tuple(STORY.format(drink="tea", food=food) for food in ("rice", "pasta", "soup"))  # they part at the food


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the one right answer."""

    text: str
    answer: str


def system_prompt(seed: int) -> SystemPrompt:
    """A role and a directory of codes, about SYSTEM_TOKENS tokens; no training dialogue has one of its facts."""
    return long_system_prompt(random.Random(f"demo {seed}"), Split.HELD_OUT, SYSTEM_TOKENS)


def conversation(system: SystemPrompt) -> tuple[Turn, ...]:
    """Small talk, a look-up, a running total, a correction, and what was said at the beginning."""
    first, second = list(system.facts)[2:4]
    return (
        Turn("Hello!", "Hello! What shall I remember?"),
        Turn("My name is Nora. My lucky number is 42.", "Noted."),
        Turn(f"What is the {system.noun} for {first}?", system.facts[first]),
        Turn("Keep a total for Ben. It starts at 30. Answer after each move.", "30"),
        Turn("Ben adds 8.", "38"),
        Turn(f"Change {second} to amber fox.", "Updated."),
        Turn("Ben takes 5.", "33"),
        Turn(f"Do you remember the {system.noun} for {second}?", "amber fox"),
        Turn("What is my name?", "Nora"),
    )


def look_ups(system: SystemPrompt, places: range) -> tuple[Turn, ...]:
    """Questions about facts of the system prompt, in the directory's order."""
    facts = list(system.facts.items())
    return tuple(Turn(f"What is the {system.noun} for {key}?", value) for key, value in (facts[i] for i in places))

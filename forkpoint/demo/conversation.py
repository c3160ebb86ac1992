"""A short conversation under a long system prompt, with the right answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PROMPTS = Path(__file__).with_name("system_prompts.json")
STORY_REPLY = "What a day!"
STORY = (
    "Let me tell you about my day. We sat by the window and had {drink}. Nobody wanted to go home yet. "
    "After that I read the paper and wrote a few letters. Later we cooked {food} for everybody. "
    "The {food} was a bit too salty, but we laughed about it."
)
# prompts that differ from the food on
STORIES = tuple(STORY.format(drink="tea", food=food) for food in ("rice", "pasta", "soup"))


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """A user's message, and the one right answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A role's opening, and a directory of facts (key to value). `noun` says what the values are."""

    opening: str
    noun: str
    facts: dict[str, str]

    @property
    def text(self) -> str:
        facts = (f"{number}. {key}: {value}." for number, (key, value) in enumerate(self.facts.items(), start=1))
        return "\n".join([self.opening, f"Each key has a {self.noun}:", *facts])


def system_prompts() -> tuple[SystemPrompt, ...]:
    """Load three system prompts of about 500 tokens, whose facts occur in no training dialogue."""
    return tuple(SystemPrompt(**content) for content in json.loads(PROMPTS.read_text(encoding="utf-8")))


def conversation(system: SystemPrompt) -> tuple[DemoTurn, ...]:
    """Return turns of small talk, a look-up, a running total, a correction, and questions about the beginning."""
    first, second = list(system.facts)[2:4]
    return (
        DemoTurn("Hello!", "Hello! What shall I remember?"),
        DemoTurn("My name is Nora. My lucky number is 42.", "Noted."),
        DemoTurn(f"What is the {system.noun} for {first}?", system.facts[first]),
        DemoTurn("Keep a total for Ben. It starts at 30. Answer after each move.", "30"),
        DemoTurn("Ben adds 8.", "38"),
        DemoTurn(f"Change {second} to amber fox.", "Updated."),
        DemoTurn("Ben takes 5.", "33"),
        DemoTurn(f"Do you remember the {system.noun} for {second}?", "amber fox"),
        DemoTurn("What is my name?", "Nora"),
    )


def look_ups(system: SystemPrompt, places: range) -> tuple[DemoTurn, ...]:
    """Return questions about the facts at these places of the system prompt's directory."""
    facts = list(system.facts.items())
    return tuple(DemoTurn(f"What is the {system.noun} for {key}?", value) for key, value in (facts[i] for i in places))

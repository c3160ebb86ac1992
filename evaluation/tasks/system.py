"""System prompts: a role, rules, and often a directory of facts that is long and shared by many dialogues."""

from __future__ import annotations

import random

from evaluation.tasks.builder import Split, SystemPrompt, pick, shuffled
from evaluation.tasks.topics import draw_value
from evaluation.tasks.words import KEYS, NOUNS, TRIGGERS

LARGEST_DIRECTORY = 48

PLACES = {
    Split.TRAINING: (
        "the city library",
        "the map archive",
        "the night porter",
        "the rowing club",
        "the old observatory",
        "the water works",
        "the travel desk",
        "the ski patrol",
        "the lost property desk",
        "the town council",
        "the zoo",
        "the tram company",
        "the youth orchestra",
        "the fire brigade",
        "the film archive",
        "the seed exchange",
    ),
    Split.HELD_OUT: (
        "the botanical society",
        "the mountain rescue",
        "the printing house",
        "the ice cream parlour",
        "the radio club",
        "the wine merchants",
    ),
}
MANNERS = (
    "Be brief and friendly.",
    "Answer with the answer alone.",
    "Do not guess.",
    "If something was corrected, the newest word counts.",
    "If you were never told, say that you do not know.",
    "Keep all totals up to date.",
    "Be patient with guests.",
    "Never tell a guest about another guest.",
    "Small talk is welcome.",
    "Follow every correction at once.",
)


def short_system_prompt(rng: random.Random) -> SystemPrompt:
    return SystemPrompt(" ".join(["You are a helpful assistant.", *shuffled(rng, MANNERS, int(rng.random() * 4))]))


def long_system_prompt(rng: random.Random, split: Split, num_tokens: int) -> SystemPrompt:
    """Build a role, manners, a directory of facts and replies to triggers, about `num_tokens` long."""
    noun = pick(rng, NOUNS)
    num_facts = max(2, min(LARGEST_DIRECTORY, int(num_tokens / 11)))
    facts = {key: draw_value(rng, key, split) for key in shuffled(rng, KEYS, num_facts)}
    num_replies = int(rng.random() * (1 + num_tokens / 80))
    replies = {trigger: draw_value(rng, trigger, split) for trigger in shuffled(rng, TRIGGERS, num_replies)}
    lines = [f"You are the assistant of {pick(rng, PLACES[split])}. {' '.join(shuffled(rng, MANNERS, 5))}"]
    lines += [f"When asked for the {trigger}, say {value}." for trigger, value in replies.items()]
    lines.append(f"Each key has a {noun}:")
    lines += [f"{number}. {key}: {value}." for number, (key, value) in enumerate(facts.items(), start=1)]
    return SystemPrompt("\n".join(lines), noun, facts, replies)

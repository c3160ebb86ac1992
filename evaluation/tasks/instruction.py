"""Rules that a system prompt sets once: which reply a trigger gets, and how to write answers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from evaluation.tasks.builder import DialogueBuilder, Scene, Setting, SystemPrompt, pick, shuffled
from evaluation.tasks.recall import RecallThread, topic_of, usual_num_keys
from evaluation.tasks.style import PLAIN, Style, draw_style
from evaluation.tasks.topics import draw_value
from evaluation.tasks.words import TRIGGERS

REQUESTS = (
    "The {trigger}, please.",
    "May I have the {trigger}?",
    "Somebody asks for the {trigger}.",
    "I need the {trigger}.",
    "What is the {trigger}?",
)


class ReplyThread:
    """Asks for the replies that the system prompt lists."""

    def __init__(self, rng: random.Random, replies: Mapping[str, str]) -> None:
        self._rng = rng
        self._replies = replies
        self._triggers = list(replies)
        self._unasked = shuffled(rng, self._triggers, len(replies))
        self._source = dict.fromkeys(replies, 0)

    def turn(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        trigger = self._unasked.pop() if self._unasked and rng.random() < 0.7 else pick(rng, self._triggers)
        if trigger in self._unasked:
            self._unasked.remove(trigger)
        text = pick(rng, REQUESTS).format(trigger=trigger)
        self._source[trigger] = dialogue.ask(text, self._replies[trigger], self._source[trigger], "reply")


def instruction(setting: Setting) -> Scene:
    """Build a scene of facts, answered in a style that the system prompt sets, and replies to triggers that it
    lists."""
    system, style = _with_rules(setting)
    ruled = replace(setting, system=system)
    facts = RecallThread(ruled, topic_of(ruled), num_keys=usual_num_keys(ruled), style=style)
    return Scene(system, (facts, ReplyThread(setting.rng, system.replies)))


def _with_rules(setting: Setting) -> tuple[SystemPrompt, Style]:
    """Return the setting's system prompt with a rule on how to answer and at least one reply."""
    rng, system = setting.rng, setting.system
    style = draw_style(rng) if rng.random() < 0.7 else PLAIN
    replies = dict(system.replies)
    lines = [system.text] if system.text else []
    if not replies:
        count = 1 + int(rng.random() * min(12, 2 + setting.num_tokens / 200))
        replies = {trigger: draw_value(rng, trigger, setting.split) for trigger in shuffled(rng, TRIGGERS, count)}
        lines += [f"When asked for the {trigger}, say {value}." for trigger, value in replies.items()]
    if style.rule:
        lines.append(style.rule)
    return SystemPrompt("\n".join(lines), system.noun, dict(system.facts), replies), style

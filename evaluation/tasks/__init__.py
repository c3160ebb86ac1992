"""Multi-turn tasks whose answers depend on facts far back, written by templates from a seed.

Training and held-out dialogues share templates and words; no fact (a key with its value, a name with its first state)
and no role of a long system prompt is in both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from evaluation.dialogue import Dialogue
from evaluation.tasks.builder import DialogueBuilder, Scene, Setting, Split, SystemPrompt, Thread, pick
from evaluation.tasks.instruction import ReplyThread, instruction
from evaluation.tasks.ledger import ledger
from evaluation.tasks.recall import RecallThread, correction, made_up, profile, recall, topic_of
from evaluation.tasks.state import state
from evaluation.tasks.system import long_system_prompt, short_system_prompt
from evaluation.tasks.talk import TalkThread
from evaluation.tasks.variables import variables


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of dialogue. `weight` is its share of the training mix, relative to the other tasks."""

    name: str
    about: str
    make: Callable[[Setting], Scene]
    weight: float


def _mixed(setting: Setting) -> Scene:
    """Return one task about keys, so that no two threads share a key, with one or two that track something."""
    rng = setting.rng
    scene = pick(rng, (recall, correction, instruction))(setting)
    others = rng.sample((variables, ledger, state, profile), 1 + int(rng.random() * 2))
    threads = [thread for other in others for thread in other(setting).threads]
    return Scene(scene.system, (*scene.threads, *threads))


def _talk(setting: Setting) -> Scene:
    return Scene(setting.system, ())


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("recall", "values of keys told near and far back", recall, 0.3),
            Task("correction", "values that were corrected, of which the newest counts", correction, 0.13),
            Task("made_up", "values of keys that are made-up words", made_up, 0.06),
            Task("profile", "what the user said of himself or herself", profile, 0.06),
            Task("variables", "numbers assigned and copied between variables", variables, 0.1),
            Task("ledger", "running totals", ledger, 0.09),
            Task("state", "positions after many small moves", state, 0.13),
            Task("instruction", "rules and replies that a system prompt sets", instruction, 0.12),
            Task("mixed", "keys, and one or two kinds of states, in turn", _mixed, 0.1),
            Task("talk", "small talk alone", _talk, 0.01),
        )
    }
)


def make_dialogue(
    task: str,
    rng: random.Random,
    num_tokens: int,
    *,
    split: Split = Split.TRAINING,
    system: SystemPrompt | None = None,
) -> Dialogue:
    """Build a dialogue of about `num_tokens` tokens, 200 to 8,000.

    `system` is its system prompt. None: the dialogue has no system prompt, or a short or long one of its own.
    """
    if system is None:
        system = _draw_system_prompt(rng, num_tokens, split)
    scene = TASKS[task].make(Setting(rng, num_tokens, split, system))
    talk_share = 0.6 * rng.random()
    talk = TalkThread(rng, stories=0.5 * rng.random(), greets=rng.random() < 0.3)
    threads = scene.threads + _system_threads(scene, rng, split)
    dialogue = DialogueBuilder(task, num_tokens, scene.system.text)
    while not dialogue.is_full:
        (talk if not threads or rng.random() < talk_share else pick(rng, threads)).turn(dialogue)
    return dialogue.finish()


def make_training_dialogue(rng: random.Random, num_tokens: int) -> Dialogue:
    """Build a dialogue of a task that is drawn by weight."""
    (task,) = rng.choices(tuple(TASKS), [task.weight for task in TASKS.values()])
    return make_dialogue(task, rng, num_tokens)


def _draw_system_prompt(rng: random.Random, num_tokens: int, split: Split) -> SystemPrompt:
    kind = rng.random()
    if kind < 0.4:
        return SystemPrompt()
    if kind < 0.6:
        return short_system_prompt(rng)
    return long_system_prompt(rng, split, int(num_tokens * (0.1 + 0.4 * rng.random())))


def _system_threads(scene: Scene, rng: random.Random, split: Split) -> tuple[Thread, ...]:
    """Return threads that ask for the system prompt's facts and replies, unless the scene's own threads do."""
    missing: list[Thread] = []
    if scene.system.facts and not any(
        isinstance(thread, RecallThread) and thread.knows_system for thread in scene.threads
    ):
        setting = Setting(rng, 0, split, scene.system)
        missing.append(RecallThread(setting, topic_of(setting), num_keys=0))
    if scene.system.replies and not any(isinstance(thread, ReplyThread) for thread in scene.threads):
        missing.append(ReplyThread(rng, scene.system.replies))
    return tuple(missing)

"""Facts that are told and asked for: plain recall, corrections (the newest counts), made-up words, and facts about the
user."""

from __future__ import annotations

from evaluation.tasks.builder import DialogueBuilder, Scene, Setting, pick
from evaluation.tasks.style import PLAIN, Style
from evaluation.tasks.topics import Codes, MadeUp, Profile, Topic
from evaluation.tasks.words import NOUNS

NOTED, UPDATED, UNKNOWN = "Noted.", "Updated.", "I do not know."
REPEAT, UNTOLD = 0.25, 0.03  # shares of questions: asked before; about a key never told


class RecallThread:
    """Tells facts, corrects some and asks for them. Each question has one answer, the newest value of its key.

    The facts of the system prompt, if it has any, are known from the start. `topic` must then be the prompt's.
    """

    def __init__(
        self, setting: Setting, topic: Topic, *, num_keys: int, corrections: float = 0.0, style: Style = PLAIN
    ) -> None:
        rng = setting.rng
        self._rng, self._split, self._topic, self._style = rng, setting.split, topic, style
        self._corrections = corrections
        self._told_share = 0.25 + 0.5 * rng.random()
        self._values: dict[str, str] = dict(setting.system.facts)
        self._source = dict.fromkeys(self._values, 0)
        self._unasked = list(self._values)
        self._known = list(self._values)
        self.knows_system = bool(self._values)
        self._new = topic.keys(rng, num_keys, self._values)
        self._untold = self._new.pop() if len(self._new) > 3 else None

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
            value = self._values[key] = self._topic.value(rng, key, self._split)
            sentences.append(self._topic.fact(rng, key, value))
            self._known.append(key)
            self._unasked.append(key)
            self._source[key] = dialogue.next_index
        dialogue.tell(" ".join(sentences), NOTED)

    def _correct(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        key = pick(rng, self._known)
        value = self._topic.value(rng, key, self._split)
        if value == self._values[key]:
            return  # a correction says something else; another turn follows anyway
        self._values[key] = value
        self._source[key] = dialogue.next_index
        if key not in self._unasked:
            self._unasked.append(key)
        dialogue.tell(self._topic.correction(rng, key, value), UPDATED)

    def _ask(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if self._untold is not None and rng.random() < UNTOLD:
            dialogue.tell(self._topic.question(rng, self._untold), UNKNOWN)
            return
        key = self._draw_question()
        answer = self._style.apply(self._values[key])
        self._source[key] = dialogue.ask(self._topic.question(rng, key), answer, self._source[key], self._topic.kind)

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


def topic_of(setting: Setting) -> Codes:
    """Return codes with the name that the system prompt gives its facts."""
    return Codes(setting.system.noun if setting.system.facts else pick(setting.rng, NOUNS))


def usual_num_keys(setting: Setting) -> int:
    return 3 + int((0.2 + setting.rng.random()) * setting.num_tokens / 90)


def recall(setting: Setting) -> Scene:
    return Scene(setting.system, (RecallThread(setting, topic_of(setting), num_keys=usual_num_keys(setting)),))


def correction(setting: Setting) -> Scene:
    rng = setting.rng
    num_keys = 2 + int(rng.random() * (2 + setting.num_tokens / 250))
    thread = RecallThread(setting, topic_of(setting), num_keys=num_keys, corrections=0.3 + 0.3 * rng.random())
    return Scene(setting.system, (thread,))


def made_up(setting: Setting) -> Scene:
    topic = MadeUp(topic_of(setting).noun)
    return Scene(setting.system, (RecallThread(setting, topic, num_keys=usual_num_keys(setting) // 2),))


def profile(setting: Setting) -> Scene:
    """Build a scene about the user. The system prompt's facts are not about the user, so other threads ask for them."""
    own = Setting(setting.rng, setting.num_tokens, setting.split, system=setting.system.without_facts())
    thread = RecallThread(own, Profile(), num_keys=12, corrections=0.3 * setting.rng.random())
    return Scene(setting.system, (thread,))

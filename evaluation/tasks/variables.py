"""Variables that get numbers or each other's values. An assignment copies the value at that moment."""

from __future__ import annotations

from evaluation.tasks.builder import DialogueBuilder, Scene, Setting, pick, shuffled
from evaluation.tasks.words import VARIABLES

ANNOUNCED = ("Let {name} = {value}.", "Set {name} = {value}.", "Now {name} = {value}.")
QUESTIONS = ("What is {name}?", "Tell me {name}.", "Print {name}.")
DONE = "OK."
COPY = 0.35


class VariablesThread:
    """Assigns and asks for variables. Values are numbers of two digits. A copied variable may be a copy, but not of a
    copy."""

    def __init__(self, setting: Setting) -> None:
        rng = setting.rng
        self._rng, self._split = rng, setting.split
        count = 2 + int(rng.random() * min(12, 2 + setting.num_tokens / 150))
        self._names = shuffled(rng, VARIABLES, count)
        self._values: dict[str, int] = {}
        self._source: dict[str, int] = {}
        self._depth: dict[str, int] = {}
        self._fresh: list[str] = []

    def turn(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        if not self._values or rng.random() < 0.4:
            self._assign(dialogue)
            return
        # what has just changed is asked for more often: the other answers stand further back
        name = pick(rng, self._fresh) if self._fresh and rng.random() < 0.4 else pick(rng, list(self._values))
        if name in self._fresh:
            self._fresh.remove(name)
        text = pick(rng, QUESTIONS).format(name=name)
        self._source[name] = dialogue.ask(text, str(self._values[name]), self._source[name], "variable")
        self._depth[name] = 0

    def _assign(self, dialogue: DialogueBuilder) -> None:
        rng = self._rng
        sentences = []
        for _ in range(1 + int(rng.random() * 3)):
            name = pick(rng, self._names)
            others = [other for other in self._values if other != name and self._depth[other] < 2]
            if others and rng.random() < COPY:
                other = pick(rng, others)
                self._values[name], self._depth[name] = self._values[other], self._depth[other] + 1
                written = other
            else:
                self._values[name], self._depth[name] = self._draw(name), 0
                written = str(self._values[name])
            self._source[name] = dialogue.next_index
            if name not in self._fresh:
                self._fresh.append(name)
            sentences.append(pick(rng, ANNOUNCED).format(name=name, value=written))
        dialogue.tell(" ".join(sentences), DONE)

    def _draw(self, name: str) -> int:
        while True:
            value = 10 + int(self._rng.random() * 90)
            if self._split.has(name, str(value)):
                return value


def variables(setting: Setting) -> Scene:
    return Scene(setting.system, (VariablesThread(setting),))

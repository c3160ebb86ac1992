"""A dialogue, the answers in it that can be scored, and its text as the chat template renders it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `role` is system, user or assistant."""

    role: str
    content: str

    def render(self) -> str:
        return f"{IM_START}{self.role}\n{self.content}{IM_END}\n"


@dataclass(frozen=True, slots=True)
class Scored:
    """An assistant message, `messages[index]`, whose whole content is the one right answer.

    `messages[source]` has the newest fact that the answer depends on. That is a fact, its last correction or its last
    mention, or the last move of a tracked thing. `kind` says what is asked for: fact, profile, reply, variable, state
    or total.
    """

    index: int
    source: int
    kind: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """An optional system message, then user and assistant in turn. The last message is the assistant's."""

    task: str
    messages: tuple[Message, ...]
    scored: tuple[Scored, ...]

    def render(self) -> str:
        return render(self.messages)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a dialogue's text. Pieces can be tokenised separately, because special tokens separate them.

    `learned`: the assistant says the piece (its content and the end of its message), so a model has to predict it.
    """

    text: str
    learned: bool
    scored: bool


def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """Return the text that the demo model's chat template renders."""
    text = "".join([message.render() for message in messages])
    return f"{text}{IM_START}assistant\n" if add_generation_prompt else text


def segments(dialogue: Dialogue) -> list[Segment]:
    """Return the pieces of `dialogue.render()` in order. The assistant's words are pieces of their own."""
    answers = {scored.index for scored in dialogue.scored}
    pieces: list[Segment] = []
    given = ""
    for index, message in enumerate(dialogue.messages):
        if message.role != "assistant":
            given += message.render()
            continue
        pieces.append(Segment(f"{given}{IM_START}assistant\n", learned=False, scored=False))
        pieces.append(Segment(f"{message.content}{IM_END}", learned=True, scored=index in answers))
        given = "\n"
    pieces.append(Segment(given, learned=False, scored=False))
    return pieces

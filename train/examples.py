"""Dialogues as tokens, with the places of the assistant's messages."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from evaluation.dialogue import IM_END, IM_START, Dialogue


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of an assistant message with its end mark.

    `distance` counts tokens from the end of the message with the newest fact that it depends on; None if it is not
    scored. The message is counted with its `group`.
    """

    start: int
    end: int
    group: str = ""
    distance: int | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A dialogue's tokens, and the spans of the assistant's messages."""

    tokens: tuple[int, ...]
    said: tuple[Span, ...]


def locate(dialogue: Dialogue, tokenizer: Tokenizer, max_tokens: int) -> Example:
    """Return the first `max_tokens` tokens of a dialogue. Answers are grouped by what they are asked for."""

    def ids(text: str) -> list[int]:
        out: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return out

    answers = {scored.index: scored for scored in dialogue.scored}
    tokens: list[int] = []
    ends: list[int] = []
    said: list[Span] = []
    for index, message in enumerate(dialogue.messages):
        tokens += ids(f"{IM_START}{message.role}\n")
        start = len(tokens)
        tokens += ids(f"{message.content}{IM_END}")
        if message.role == "assistant" and len(tokens) <= max_tokens:
            answer = answers.get(index)
            scored = (answer.kind, start - ends[answer.source]) if answer else ()
            said.append(Span(start, len(tokens), *scored))
        ends.append(len(tokens))
        tokens += ids("\n")
    return Example(tuple(tokens[:max_tokens]), tuple(said))

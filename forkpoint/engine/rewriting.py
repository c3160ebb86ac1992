"""Rewrites conversations to a form that a chat template takes. docs/server.md lists the rules.

The rewritten form of a message depends only on the messages before it and on the template. The prompt of one turn
therefore stays a prefix of the next turn's, if the template allows that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count, groupby, takewhile
from typing import Any, Final

from forkpoint.engine.call_writing import WRITERS, NotationName
from forkpoint.engine.conversation import Message, content_texts, with_text
from forkpoint.engine.template_traits import TemplateTraits

SYSTEM_ROLES: Final = ("system", "developer")
MAX_SHORT_ID: Final = 10**9  # ids of nine digits


class Rewrite(Enum):
    """Kinds of changes, with the text that the log shows."""

    JOINED_SYSTEM = "it takes one system message, so those at the beginning are joined"
    SYSTEM_TO_USER = "it takes no system message, so the text of one becomes a user message"
    LATE_SYSTEM = (
        "it takes system messages at the beginning only, so later ones get <system> tags and become user messages"
    )
    DEVELOPER = "it does not know the role developer, which becomes system"
    JOINED_MESSAGES = "it refuses two messages of one role in a row, so those are joined"
    EMPTY_MESSAGE = "it refuses a message at its place, so an empty message of the other role is put before it"
    CALLS_TO_TEXT = "it does not show tool calls, which are written into the content"
    SPLIT_MESSAGE = "it does not show all of a message with tool calls, which is split"
    RESULT_TO_USER = "it does not take the role tool, so results become user messages in <tool_response> tags"
    ARGUMENTS = "it takes arguments of calls that are JSON objects only, so others are wrapped in one"
    SHORT_IDS = "it takes ids of calls of nine characters only, so they are numbered"
    NO_REASONING = "it does not show the reasoning of earlier messages"


@dataclass(frozen=True, slots=True)
class Placed:
    """A message, and the index of the first message of the client's conversation that it contains."""

    index: int
    message: dict[str, Any]

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def text(self) -> str:
        return "\n".join(content_texts(self.message))

    @property
    def calls(self) -> Sequence[dict[str, Any]]:
        calls: Sequence[dict[str, Any]] = self.message.get("tool_calls", ())
        return calls

    def with_text(self, text: str, role: str | None = None) -> Placed:
        message = with_text(self.message, text)
        if role is not None:
            message = {"role": role, "content": message["content"]}
        return replace(self, message=message)

    def with_calls(self, calls: Sequence[dict[str, Any]]) -> Placed:
        message = {name: value for name, value in self.message.items() if name != "tool_calls"}
        if calls:
            message["tool_calls"] = list(calls)
        return replace(self, message=message)


@dataclass(frozen=True, slots=True)
class Rewritten:
    conversation: tuple[Placed, ...]
    rewrites: frozenset[Rewrite]

    @property
    def messages(self) -> list[Message]:
        return [placed.message for placed in self.conversation]


class Rewriter:
    """Rewrites conversations for one template."""

    def __init__(self, traits: TemplateTraits, notation: NotationName) -> None:
        """`notation` is used for calls that a template with these traits does not show."""
        self._traits = traits
        self._write_calls = WRITERS[notation]
        self._names_calls = traits.call_ids == "named" or notation == "kimi"

    def rewrite(self, messages: Sequence[dict[str, Any]]) -> Rewritten:
        """Rewrite `messages`, which `read_message` returned, to the conversation that the template is given.

        Lists the kinds of changes.
        """
        rewrites: set[Rewrite] = set()
        placed = [Placed(index, message) for index, message in enumerate(messages)]
        if self._names_calls:
            placed = _renamed_calls(placed, lambda name, number: f"functions.{name}:{number}")
        elif self._traits.call_ids == "short":
            placed = _renamed_calls(placed, lambda _, number: f"{number % MAX_SHORT_ID:09d}", rewrites)
        if not self._traits.reasoning and any(one.message.get("reasoning") for one in placed):
            rewrites.add(Rewrite.NO_REASONING)
        for step in (self._system, self._joined, self._calls, self._joined, self._filled):
            placed = step(placed, rewrites)
        return Rewritten(tuple(placed), frozenset(rewrites))

    def _system(self, placed: list[Placed], rewrites: set[Rewrite]) -> list[Placed]:
        """Return the messages with system and developer ones as the template can show them.

        This and the next methods note what they change in `rewrites`.
        """
        traits = self._traits
        if not traits.developer and any(one.role == "developer" for one in placed):
            rewrites.add(Rewrite.DEVELOPER)
            placed = [
                replace(one, message={**one.message, "role": "system"}) if one.role == "developer" else one
                for one in placed
            ]
        first = list(takewhile(lambda one: one.role in SYSTEM_ROLES, placed))
        rest = placed[len(first) :]
        if first and not traits.system:
            rewrites.add(Rewrite.SYSTEM_TO_USER)
            first = [first[0].with_text(_joined_texts(first), "user")]
        elif len(first) > 1 and not traits.several_systems:
            rewrites.add(Rewrite.JOINED_SYSTEM)
            first = [first[0].with_text(_joined_texts(first))]
        if not traits.late_system and any(one.role in SYSTEM_ROLES for one in rest):
            rewrites.add(Rewrite.LATE_SYSTEM)
            rest = self._without_system(rest)
        return first + rest

    def _without_system(self, placed: list[Placed]) -> list[Placed]:
        """Return the messages with system ones turned into the user's, or appended to the result before them."""
        turned: list[Placed] = []
        for one in placed:
            if one.role not in SYSTEM_ROLES:
                turned.append(one)
            elif turned and turned[-1].role == "tool" and not self._traits.user_keeps_reasoning:
                result = turned.pop()
                turned.append(result.with_text(f"{result.text}\n\n{_tagged('system', one)}"))
            else:
                turned.append(one.with_text(_tagged("system", one), "user"))
        return turned

    def _joined(self, placed: list[Placed], rewrites: set[Rewrite]) -> list[Placed]:
        """Join consecutive messages of one role if the template refuses them."""
        taken = {"user": self._traits.user_repeats, "assistant": self._traits.assistant_repeats}
        joined: list[Placed] = []
        for role, group in groupby(placed, lambda one: one.role):
            neighbours = list(group)
            if len(neighbours) > 1 and not taken.get(role, True):
                rewrites.add(Rewrite.JOINED_MESSAGES)
                neighbours = [_join(neighbours)]
            joined += neighbours
        return joined

    def _calls(self, placed: list[Placed], rewrites: set[Rewrite]) -> list[Placed]:
        """Return the messages with calls and results in the form that the template shows, or as text."""
        traits = self._traits
        shown: list[Placed] = []
        shows_results = traits.results_of_text  # whether results of the last assistant message's calls are shown
        for one in placed:
            if one.role == "assistant":
                messages = self._calling(one, rewrites)
                shows_results = traits.results_of_text
                if messages[-1].calls:
                    shows_results = traits.results_of_calls
                shown += messages
            elif one.role == "tool" and not shows_results:
                rewrites.add(Rewrite.RESULT_TO_USER)
                shown.append(one.with_text(_tagged("tool_response", one), "user"))
            else:
                shown.append(one)
        return shown

    def _calling(self, one: Placed, rewrites: set[Rewrite]) -> list[Placed]:
        """Return the one or more messages that show an assistant message and its calls."""
        if not one.calls:
            return [one]
        traits = self._traits
        splits_text = bool(one.text) and not traits.text_with_calls
        splits_calls = len(one.calls) > 1 and not traits.several_calls
        is_text_refused = splits_text and not traits.text_before_calls
        are_calls_refused = splits_calls and not traits.assistant_repeats
        if not traits.calls or is_text_refused or are_calls_refused:
            rewrites.add(Rewrite.CALLS_TO_TEXT)
            calls = [_with_arguments(call, "mapping") for call in one.calls]
            text = "\n".join(filter(None, (one.text, self._write_calls(calls))))
            return [one.with_calls([]).with_text(text)]
        if traits.arguments == "mapping" and any(isinstance(_arguments(call), str) for call in one.calls):
            rewrites.add(Rewrite.ARGUMENTS)
        given = [_with_arguments(call, traits.arguments) for call in one.calls]
        first, *others = [[call] for call in given] if splits_calls else [given]
        bare = one.with_text("", "assistant")
        parts = [one.with_calls([]), bare.with_calls(first)] if splits_text else [one.with_calls(first)]
        parts += [bare.with_calls(calls) for calls in others]
        if len(parts) > 1:
            rewrites.add(Rewrite.SPLIT_MESSAGE)
        return parts

    def _filled(self, placed: list[Placed], rewrites: set[Rewrite]) -> list[Placed]:
        """Return the messages, with empty ones inserted where the template demands them (noted in `rewrites`).

        An empty answer gets a blank as its text if the template cannot show it.
        """
        traits = self._traits
        answer = "" if traits.empty_answer else " "
        takes_answer_first = traits.assistant_first
        if not traits.no_user and not any(one.role == "user" for one in placed):
            takes_answer_first = False
        filled: list[Placed] = []
        for one in placed:
            before = filled[-1] if filled else None
            if before is None or before.role in SYSTEM_ROLES:
                needs_user = one.role in ("assistant", "tool") and not takes_answer_first
                filled += [one.with_text("", "user")] * needs_user
            elif before.role == "tool" or before.calls:
                needs_answer = one.role == "user" and not traits.user_after_result
                filled += [one.with_text(answer, "assistant")] * needs_answer
            if one.role == "assistant" and not traits.empty_answer and not one.text and not one.calls:
                one = one.with_text(answer)
            filled.append(one)
        if not traits.no_user and all(one.role in SYSTEM_ROLES for one in filled):
            filled.append(filled[-1].with_text("", "user"))
        if len(filled) > len(placed):
            rewrites.add(Rewrite.EMPTY_MESSAGE)
        return filled


def _renamed_calls(
    placed: list[Placed], new_id: Callable[[str, int], str], rewrites: set[Rewrite] | None = None
) -> list[Placed]:
    """Return the messages with each call's id `new_id(name of its function, number of calls before it)`.

    Its result gets the same id. With `rewrites`, a change is noted there as SHORT_IDS.
    """
    numbers = count()
    ids: dict[str, str] = {}
    renamed = []
    for one in placed:
        message = one.message
        if one.calls:
            calls = [{**call, "id": new_id(call["function"]["name"], next(numbers))} for call in one.calls]
            given = [(old.get("id"), new["id"]) for old, new in zip(one.calls, calls, strict=True)]
            ids |= {old: new for old, new in given if isinstance(old, str)}
            message = {**message, "tool_calls": calls}
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in ids:
            message = {**message, "tool_call_id": ids[answered]}
        if message is not one.message and rewrites is not None:
            rewrites.add(Rewrite.SHORT_IDS)
        renamed.append(replace(one, message=message))
    return renamed


def _join(neighbours: list[Placed]) -> Placed:
    """Join several messages into one of the first one's role, with the texts, reasoning and calls of all."""
    first = neighbours[0].with_text(_joined_texts(neighbours))
    reasoning = [one.message["reasoning"] for one in neighbours if one.message.get("reasoning")]
    if reasoning:
        text = "\n\n".join(reasoning)
        first = replace(first, message={**first.message, "reasoning": text, "reasoning_content": text})
    return first.with_calls([call for one in neighbours for call in one.calls])


def _joined_texts(placed: Sequence[Placed]) -> str:
    return "\n\n".join(one.text for one in placed if one.text)


def _tagged(tag: str, one: Placed) -> str:
    return f"<{tag}>\n{one.text}\n</{tag}>"


def _arguments(call: dict[str, Any]) -> Any:
    return call["function"]["arguments"]


def _with_arguments(call: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the call with its arguments in a form of `TemplateTraits.arguments`."""
    arguments = _arguments(call)
    if form == "mapping" and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    elif form == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}

"""Finds which messages a chat template takes and shows, by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from forkpoint.engine.conversation import Message, content_of, content_texts
from forkpoint.params import MAX_THINKING_END_CHARS, THINK_END, THINKING_END

Render: TypeAlias = Callable[[Sequence[Message]], str | None]  # None if the template refuses the conversation
ArgumentForm: TypeAlias = Literal["any", "mapping", "text"]
CallIds: TypeAlias = Literal["any", "named", "short"]

UNKNOWN_ROLE: Final = "narrator"  # a role that no template knows
# Words that do not occur in the texts of templates.
FIRST, SECOND, THIRD, FOURTH = "qzfirst", "qzsecond", "qzthird", "qzfourth"
FUNCTION, OTHER_FUNCTION, KEY, VALUE = "qzfunction", "qzother", "qzkey", "qzvalue"
# An id for each of `CallIds`. A template that takes the first one shows the call's name whatever the id is.
PROBE_IDS: Final[Mapping[CallIds, str]] = {
    "any": "call_qz00000001",
    "named": f"functions.{FUNCTION}:1",
    "short": "qz0000001",
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The messages that a chat template takes. The defaults describe a template that takes and shows everything.

    A trait is true if the template renders the messages it names and shows their texts in order. In addition a system
    message or a tool result must not look like a message of the user or the assistant.
    """

    system: bool = True  # a system message at the beginning
    several_systems: bool = True  # more than one system message at the beginning
    late_system: bool = True  # system messages after other messages
    no_user: bool = True  # conversations without a user message
    developer: bool = True  # the role `developer`, handled differently from unknown role names
    assistant_first: bool = True  # an assistant message before all user messages
    user_repeats: bool = True  # two user messages in a row
    assistant_repeats: bool = True  # two assistant messages in a row
    user_after_result: bool = True  # a user message directly after a tool result
    # a user message after a tool result does not remove the reasoning before the result
    user_keeps_reasoning: bool = True
    empty_answer: bool = True  # an assistant message without a text or calls
    reasoning: bool = True  # `reasoning_content` of a call that has just been answered
    calls: bool = True  # `tool_calls`, with the function's name and its arguments
    arguments: ArgumentForm = "any"  # the form of a call's arguments; `any`: a mapping or a text
    # Ids of calls. `named`: `functions.NAME:N`, because Kimi's templates show a call only by its id. `short`: nine
    # characters, because Mistral's templates refuse others.
    call_ids: CallIds = "any"
    several_calls: bool = True  # two calls in one message
    text_with_calls: bool = True  # content and calls of one message
    text_before_calls: bool = True  # a message with content, then one with calls
    results_of_calls: bool = True  # the role `tool` after `tool_calls`
    thinking_end: str = THINKING_END  # the text between the thinking of an answer and its content
    results_of_text: bool = True  # the role `tool` after an assistant message without `tool_calls`


def probe_traits(render: Render, *, in_parts: bool) -> TemplateTraits:
    """Find the traits of a template by rendering some dozens of conversations of at most six messages.

    `in_parts`: it reads content as lists of parts. A template that refuses plain turns of user and assistant gets the
    default traits, because it cannot be probed.
    """
    probe = _Probe(render, in_parts)
    user, answer, system = probe.user, probe.answer, probe.system
    if not probe.shows([user(FIRST), answer(SECOND), user(THIRD)]):
        return TemplateTraits()
    has_system = _takes_system(probe)
    lead = [system("qzlead")] * has_system
    return TemplateTraits(
        system=has_system,
        several_systems=has_system and probe.shows([system(FIRST), system(SECOND), user(THIRD)], foreign=1),
        late_system=has_system and _takes_late_system(probe, lead),
        no_user=probe.shows([answer(FIRST)]) and (not has_system or probe.shows([system(FIRST)])),
        developer=_knows_developer(probe),
        assistant_first=probe.shows([*lead, answer(FIRST), user(SECOND)], foreign=len(lead), others=("user",)),
        user_repeats=probe.shows([*lead, user(FIRST), user(SECOND), answer(THIRD), user(FOURTH)]),
        assistant_repeats=probe.shows([*lead, user(FIRST), answer(SECOND), answer(THIRD), user(FOURTH)]),
        empty_answer=probe.shows([user(FIRST), answer(""), user(SECOND)]),
        thinking_end=_thinking_end(probe),
        **_call_traits(probe),
    )


def _thinking_end(probe: _Probe) -> str:
    """Return the text between thinking and content, or the usual one if the template does not show thinking."""
    text = probe.render([probe.user(FIRST), probe.answer(THIRD, reasoning_content=SECOND)])
    end = (text or "").partition(SECOND)[2].partition(THIRD)[0]
    if THINK_END not in end or len(end) > MAX_THINKING_END_CHARS:
        return THINKING_END
    return end


class _Probe:
    """Renders conversations of a few words and searches the text for them."""

    def __init__(self, render: Render, in_parts: bool) -> None:
        self.render = render
        self._in_parts = in_parts

    def say(self, role: str, text: str, **others: Any) -> dict[str, Any]:
        return {"role": role, "content": content_of([text], in_parts=self._in_parts), **others}

    def user(self, text: str) -> dict[str, Any]:
        return self.say("user", text)

    def answer(self, text: str, **others: Any) -> dict[str, Any]:
        return self.say("assistant", text, **others)

    def system(self, text: str) -> dict[str, Any]:
        return self.say("system", text)

    def shows(
        self,
        messages: Sequence[Message],
        *words: str,
        foreign: int | None = None,
        others: Sequence[str] = ("user", "assistant"),
    ) -> bool:
        """Return whether the template renders `messages` with all their texts in order, and `words` anywhere.

        The message with index `foreign` must also be rendered differently from the same message by any role of
        `others`.
        """
        text = self.render(messages)
        if text is None or not all(word in text for word in words):
            return False
        if not _in_order(text, [word for message in messages if (word := _word(message))]):
            return False
        if foreign is None:
            return True
        message = messages[foreign]
        roles = [[*messages[:foreign], {**message, "role": role}, *messages[foreign + 1 :]] for role in others]
        return all(self.render(conversation) != text for conversation in roles)


def _takes_system(probe: _Probe) -> bool:
    """Return whether a system message at the beginning is shown, whoever writes the last message.

    Mistral's templates show it with the last message, and only if that is a user message.
    """
    messages = [probe.system(FIRST), probe.user(SECOND)]
    if not probe.shows(messages, foreign=0, others=("assistant",)):
        return False
    answered = probe.render([*messages, probe.answer(THIRD)])
    return answered is None or FIRST in answered


def _takes_late_system(probe: _Probe, lead: list[dict[str, Any]]) -> bool:
    """Return whether system messages are shown in place after a user message, after an answer, and at the end."""
    user, answer, system = probe.user, probe.answer, probe.system
    after_answer = [*lead, user(FIRST), answer(SECOND), system(THIRD), user(FOURTH)]
    after_user = [*lead, user(FIRST), system(SECOND), answer(THIRD), user(FOURTH)]
    at_end = [*lead, user(FIRST), answer(SECOND), user(THIRD), system(FOURTH)]
    place = len(lead)
    return (
        probe.shows(after_answer, foreign=place + 2)
        and probe.shows(after_user, foreign=place + 1)
        and probe.shows(at_end, foreign=place + 3)
    )


def _knows_developer(probe: _Probe) -> bool:
    """Return whether the role developer is rendered differently from an unknown role."""
    messages = [probe.say("developer", FIRST), probe.user(SECOND)]
    if not probe.shows(messages, foreign=0):
        return False
    unknown = probe.render([probe.say(UNKNOWN_ROLE, FIRST), probe.user(SECOND)])
    return unknown is None or unknown.replace(UNKNOWN_ROLE, "developer") != probe.render(messages)


def _call_traits(probe: _Probe) -> dict[str, Any]:
    user, answer = probe.user, probe.answer
    result = probe.say("tool", THIRD, tool_call_id=PROBE_IDS["any"], name=FUNCTION)
    rest = [answer("qzanswer"), user("qzuser")]
    of_text = probe.shows([user(FIRST), answer(SECOND), result, *rest], foreign=2)
    form = _call_form(probe)
    if form is None:
        return {
            "calls": False,
            "results_of_calls": False,
            "results_of_text": of_text,
            "reasoning": _shows_reasoning(probe, None, takes_result=of_text),
        }
    call, arguments, call_ids = form
    result = {**result, "tool_call_id": call["id"]}
    calling = answer("", tool_calls=[call])
    of_calls = probe.shows([user(FIRST), calling, result, *rest], foreign=2)
    results = [result] * of_calls
    other = _call(OTHER_FUNCTION, call["id"].replace(FUNCTION, OTHER_FUNCTION), call["function"]["arguments"])
    both = answer("", tool_calls=[call, other])
    return {
        "arguments": arguments,
        "call_ids": call_ids,
        "several_calls": probe.shows([user(FIRST), both, *results], FUNCTION, OTHER_FUNCTION),
        "text_with_calls": probe.shows([user(FIRST), answer(SECOND, tool_calls=[call]), *results], FUNCTION, VALUE),
        "text_before_calls": probe.shows([user(FIRST), answer(SECOND), calling, *results, *rest], FUNCTION, VALUE),
        "results_of_calls": of_calls,
        "results_of_text": of_text,
        "user_after_result": probe.shows([user(FIRST), calling, *results, user(FOURTH)]),
        "user_keeps_reasoning": _user_keeps_reasoning(probe, call, results),
        "reasoning": _shows_reasoning(probe, call, takes_result=of_calls),
    }


def _call_form(probe: _Probe) -> tuple[dict[str, Any], ArgumentForm, CallIds] | None:
    """Return a call as the template shows it, and the forms of arguments and ids; None if calls are not shown."""
    for call_ids, call_id in PROBE_IDS.items():
        mapping = _call(FUNCTION, call_id, {KEY: VALUE})
        text = _call(FUNCTION, call_id, f'{{"{KEY}": "{VALUE}"}}')
        as_mapping, as_text = _shown_call(probe, mapping), _shown_call(probe, text)
        if as_mapping is not None and (f"{{'{KEY}'" not in as_mapping or as_text is None):
            return mapping, "mapping" if as_text is None else "any", call_ids
        if as_text is not None:  # a mapping is refused, or shown as a Python dict
            return text, "text", call_ids
    return None


def _shown_call(probe: _Probe, call: dict[str, Any]) -> str | None:
    """Return a rendering that shows the call; None if there is none.

    Some templates take a call only with its result, or with a user message after it.
    """
    calling = probe.answer("", tool_calls=[call])
    result = probe.say("tool", SECOND, tool_call_id=call["id"], name=FUNCTION)
    for rest in ([], [result], [probe.user(SECOND)]):
        messages = [probe.user(FIRST), calling, *rest]
        if probe.shows(messages, FUNCTION, KEY, VALUE):
            return probe.render(messages)
    return None


def _shows_reasoning(probe: _Probe, call: dict[str, Any] | None, *, takes_result: bool) -> bool:
    messages = [probe.user(FIRST), probe.answer(SECOND, reasoning_content=THIRD, reasoning=THIRD)]
    text = probe.render(messages)
    if text is not None and THIRD in text:
        return True
    if call is None or not takes_result:
        return False
    result = probe.say("tool", THIRD, tool_call_id=call["id"], name=FUNCTION)
    text = probe.render([probe.user(FIRST), _thinking(probe, call), result])
    return text is not None and SECOND in text


def _user_keeps_reasoning(probe: _Probe, call: dict[str, Any], result: list[dict[str, Any]]) -> bool:
    """Return whether reasoning shown after the last question is still shown when a user message follows the result.

    Qwen3.5's template treats that message as the next question and drops the reasoning before it.
    """
    messages = [probe.user(FIRST), _thinking(probe, call), *result]
    alone, followed = probe.render(messages), probe.render([*messages, probe.user(FOURTH)])
    return alone is None or followed is None or alone.count(SECOND) == followed.count(SECOND)


def _thinking(probe: _Probe, call: dict[str, Any]) -> dict[str, Any]:
    return probe.answer("", reasoning_content=SECOND, reasoning=SECOND, tool_calls=[call])


def _call(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _word(message: Message) -> str:
    return content_texts(message)[0]


def _in_order(text: str, words: Sequence[str]) -> bool:
    """Return whether `text` has the words in order, none of them inside a Python list of parts."""
    position = 0
    for word in words:
        position = text.find(word, position)
        if position < 0 or f"'text': '{word}'" in text:
            return False
        position += len(word)
    return True

"""Any conversation gets through templates in the styles of published models, and is shown as a whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.engine.chat import ChatTemplate
from tests.engine.chat_templates import STYLES
from tests.engine.tokenizers import byte_level

TOKENIZER = byte_level()
TEMPLATES = {name: ChatTemplate(TOKENIZER, template) for name, template in STYLES.items()}
DROPS_REASONING = {"qwen35"}  # of turns before the last question, even if there is none
NAMES_RESULTS = {"kimi", "harmony"}  # results are shown with the names of their functions
TOOLS = [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}]


def text_of(style: str, messages: list[dict[str, Any]], **options: Any) -> str:
    text = TEMPLATES[style].render(messages, **options).text
    assert text is not None
    return text


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in nearly any order; each text is a word that occurs nowhere else."""
    numbers = iter(range(1000))

    def word(kind: str) -> str:
        return f"z{kind}{next(numbers)}z"

    def answer() -> Iterator[dict[str, Any]]:
        calls = []
        for _ in range(draw(st.integers(0, 2))):
            arguments = [json.dumps({"key": word("value")}), {"key": word("value")}, f'{{"key": "{word("cut")}', "null"]
            function = {"name": word("function"), "arguments": draw(st.sampled_from(arguments))}
            calls.append({"id": f"call_{next(numbers)}", "type": "function", "function": function})
        texts = [word("answer"), None, ""] if calls else [word("answer"), word("answer"), None]
        message: dict[str, Any] = {"role": "assistant", "content": draw(st.sampled_from(texts))}
        if draw(st.booleans()):
            message["reasoning_content"] = word("reasoning")
        yield {**message, "tool_calls": calls} if calls else message
        if draw(st.integers(0, 4)):
            for call in calls:
                yield {"role": "tool", "tool_call_id": call["id"], "content": word("result")}

    roles = draw(
        st.lists(st.sampled_from(["user", "user", "assistant", "assistant", "system", "developer"]), min_size=1)
    )
    messages: list[dict[str, Any]] = []
    for role in roles:
        if role == "assistant":
            messages += answer()
        else:
            content = word(role)
            messages.append(
                {"role": role, "content": draw(st.sampled_from([content, [{"type": "text", "text": content}]]))}
            )
    return messages


def words_of(messages: list[dict[str, Any]]) -> list[str]:
    words = []
    for message in messages:
        content = message["content"]
        words.append(content[0]["text"] if isinstance(content, list) else content)
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            words.append(call["function"]["name"])
            given = arguments if isinstance(arguments, str) else json.dumps(arguments)
            words += [word for word in given.replace("{", '"').split('"') if word.startswith("z")]
    return [word for word in words if word]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(), has_tools=st.booleans())
def test_every_text_is_shown_once(style: str, messages: list[dict[str, Any]], has_tools: bool) -> None:
    text = text_of(style, messages, tools=TOOLS if has_tools else None)
    counts = {word: text.count(word) for word in words_of(messages)}
    if style in NAMES_RESULTS:
        counts |= {word: 1 for word, count in counts.items() if "function" in word and count}
    assert counts == dict.fromkeys(counts, 1), text
    assert all(text.count(message["reasoning_content"]) <= 1 for message in messages if "reasoning_content" in message)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(), has_tools=st.booleans())
def test_the_prompt_of_a_turn_begins_that_of_the_next(
    style: str, messages: list[dict[str, Any]], has_tools: bool
) -> None:
    """A turn is answered where the conversation goes on with an answer."""
    options: dict[str, Any] = {"tools": TOOLS if has_tools else None, "add_generation_prompt": False}
    for end, (before, after) in enumerate(itertools.pairwise(messages), start=1):
        asked = any(message["role"] == "user" for message in messages[:end])
        if asked and before["role"] != "assistant" and after["role"] == "assistant":
            roles = [message["role"] for message in messages[end:]]
            num_more = len(list(itertools.takewhile(lambda role: role in ("assistant", "tool"), roles)))
            later_end = end + num_more if style in DROPS_REASONING else len(messages)
            earlier, later = text_of(style, messages[:end], **options), text_of(style, messages[:later_end], **options)
            assert later.startswith(earlier), (messages[:end], earlier, later)

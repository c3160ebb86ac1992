"""Notations of tool calls that other families than Qwen write, and which of them a template asks for."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.config import EngineConfig
from forkpoint.engine.call_writing import notation_name
from forkpoint.engine.chat import ChatTemplate
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.server.answer import AnswerParser, CallPart, Content, Reasoning
from forkpoint.server.calls.reader import Notation
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.config import ServerConfig
from forkpoint.server.notations import KIMI, LFM2, LING, NOTATIONS, OLMO3, QWEN
from forkpoint.server.talk import PreparedTurn
from forkpoint.server.texts import Facts, Texts
from forkpoint.server.tokens import tokenize
from tests.engine.tokenizers import byte_level
from tests.server.test_answer import TOOLS, taken_apart

PYTHON = [
    ('[weather(city="K\u00f6ln [\\"x\\"]", days=3)]', [("weather", '{"city": "K\u00f6ln [\\"x\\"]", "days": 3}')]),
    (
        "[now(), a.b(x=[1, -2.5, {'k': None}], y=true)]",
        [("now", "{}"), ("a.b", '{"x": [1, -2.5, {"k": null}], "y": true}')],
    ),
    ("now()\nweather(city='Bad\\nEms')", [("now", "{}"), ("weather", '{"city": "Bad\\nEms"}')]),
]


@pytest.mark.parametrize("notation", [LFM2, OLMO3])
@pytest.mark.parametrize(("body", "calls"), PYTHON)
def test_calls_written_as_python(body: str, calls: list[tuple[str, str]], notation: Notation) -> None:
    text = f"Let me see.\n{notation.opening}{body}{notation.closing}\nDone"
    options: dict[str, Any] = {"tools": TOOLS, "notation": notation}
    assert taken_apart([text], **options) == ("", "Let me see.Done", calls)
    assert taken_apart(list(text), **options) == ("", "Let me see.Done", calls)
    assert taken_apart([text], **options, single=True) == ("", "Let me see.", calls[:1])
    unclosed = text[: text.index(notation.closing)]
    assert taken_apart([unclosed], **options) == ("", "Let me see.", calls)


@pytest.mark.parametrize(
    "body",
    [
        "[now(",
        "[now(1)]",
        "[now(x=y)]",
        "[now(**x)]",
        "[now(x=b'y')]",
        "[now(x={1: 2})]",
        "[now(x=1e999)]",
        "[]",
        "x = 1",
        "{}",
        "",
        "[" * 5000,
        "-" * 5000 + "1",
        "now(x=" + "9" * 5000 + ")",
        "now(x=\\",
        "now(x=[1, '\\",
    ],
)
def test_what_is_no_python_call_stays_text(body: str) -> None:
    for text in (f"see {LFM2.opening}{body}{LFM2.closing} there", f"see {LFM2.opening}{body}"):
        assert taken_apart([text], tools=TOOLS, notation=LFM2) == ("", text, [])


@given(st.text(alphabet="now()[]=,'1\\ \n<>|tocal_ser", max_size=60))
def test_python_calls_in_pieces_are_those_of_the_whole(body: str) -> None:
    opened = f"a {LFM2.opening}{body}"
    for text in (opened, f"{opened}{LFM2.closing} b {LFM2.opening}[now()]{LFM2.closing}"):
        whole = taken_apart([text], tools=TOOLS, notation=LFM2)
        assert taken_apart(list(text), tools=TOOLS, notation=LFM2) == whole


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(*calls: tuple[str, str]) -> str:
    """A section of calls, as Kimi-K2's chat template writes it."""
    between = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    return SECTION + "".join(between.format(*call) for call in calls) + SECTION_END


KIMI_CALLS = [
    ([("functions.weather:0", '{"city": "K\u00f6ln <|tool_call_end|>", "days": 3.10}')], ["weather"]),
    ([("functions.now:0", "{}"), ("functions.a.b:1", '{\n  "x": [1, {"k": null}]\n}')], ["now", "a.b"]),
    (
        [(" now:12 ", ' {"y": "\\"}"} '), ("functions.now:13", '{"x": "<b>"}'), ("functions.f-1:14", "{}")],
        ["now", "now", "f-1"],
    ),
    ([("functions.now:0", "")], ["now"]),
]


@pytest.mark.parametrize(("written", "names"), KIMI_CALLS)
def test_calls_in_a_section(written: list[tuple[str, str]], names: list[str]) -> None:
    calls = [(name, arguments.strip() or "{}") for name, (_, arguments) in zip(names, written, strict=True)]
    text = f"Let me see. \n{kimi(*written)}\nDone"
    options: dict[str, Any] = {"tools": TOOLS, "notation": KIMI}
    assert taken_apart([text], **options) == ("", "Let me see.Done", calls)
    assert taken_apart(list(text), **options) == ("", "Let me see.Done", calls)
    assert taken_apart([text], **options, single=True) == ("", "Let me see.", calls[:1])
    for unclosed in (text[: text.index(SECTION_END)], text[: text.rindex("<|tool_call_end|>")]):
        if unclosed.endswith("_begin|>"):
            continue  # cut off before its arguments
        assert taken_apart(list(unclosed), **options) == ("", "Let me see.", calls)


def test_a_call_in_a_section_is_told_before_the_next_is_whole() -> None:
    parser = AnswerParser(tools=TOOLS, notation=KIMI)
    text = kimi(("functions.now:0", "{}"), ("functions.now:1", "{}"))
    assert parser.feed(text[: text.rindex("functions")]) == [CallPart(0, "now", "{}")]
    assert parser.feed(text[text.rindex("functions") :]) == [CallPart(1, "now", "{}")]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no call",
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.other<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.now.0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>now:0<|tool_call_end|>",
        "<|tool_call_begin|>" + "n" * 5000,
        kimi(("functions.other:0", '{"x": NaN}'))[len(SECTION) : -len(SECTION_END)],
        kimi(("functions.other:0", '{"x": 1'))[len(SECTION) : -len(SECTION_END)],
        kimi(("functions.now:0", "[1]"))[len(SECTION) : -len(SECTION_END)],
        kimi(("functions.other:0", '{"x":' * 3000 + "1" + "}" * 3000))[len(SECTION) : -len(SECTION_END)],
    ],
    ids=range(11),
)
def test_what_is_no_call_in_a_section_stays_text(body: str) -> None:
    good = kimi(("functions.now:1", "{}"))
    for text in (f"see {SECTION}{body}{SECTION_END} there", f"see {SECTION}{body}"):
        assert taken_apart([text], tools=TOOLS, notation=KIMI) == ("", text, [])
        assert taken_apart(list(text), tools=TOOLS, notation=KIMI) == ("", text, [])
        assert taken_apart([f"{text}\n{good}"], tools=TOOLS, notation=KIMI) == ("", text, [("now", "{}")])


@given(
    st.lists(
        st.sampled_from(
            [
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                SECTION,
                SECTION_END,
                "functions.now:0",
                "{}",
                '{"x": "',
                '"}',
                " ",
                "a",
            ]
        ),
        max_size=16,
    )
)
def test_sections_in_pieces_are_those_of_the_whole(parts: list[str]) -> None:
    text = f"a {SECTION}{''.join(parts)} b {kimi(('now:0', '{}'))}"
    whole = taken_apart([text], tools=TOOLS, notation=KIMI)
    assert taken_apart(parts_of(text), tools=TOOLS, notation=KIMI) == whole
    assert taken_apart(list(text), tools=TOOLS, notation=KIMI) == whole


def parts_of(text: str) -> list[str]:
    return [text[start : start + 7] for start in range(0, len(text), 7)]


CITY, DAYS = "<arg_key>city</arg_key>", "<arg_key>days</arg_key>"


@pytest.mark.parametrize("between", ["", "\n", "\\n"])
@pytest.mark.parametrize(
    ("name", "body", "arguments"),
    [
        ("now", "", "{}"),
        ("weather", f"{CITY}<arg_value>7</arg_value>", '{"city": "7"}'),
        (
            "weather",
            f"{CITY}\n<arg_value>a </tool_call> <b></arg_value>\n{DAYS}<arg_value>[3]</arg_value>\n",
            '{"city": "a </tool_call> <b>", "days": [3]}',
        ),
    ],
)
def test_calls_with_keys_and_values(name: str, body: str, arguments: str, between: str) -> None:
    call = f"<tool_call>{name}{between}{body}</tool_call>"
    text = f"Let me see.\n{call}\n{call}"
    options: dict[str, Any] = {"tools": TOOLS, "notation": LING}
    expected = ("", "Let me see.", [(name, arguments)] * 2)
    for chunks in ([text], list(text), parts_of(text)):
        assert taken_apart(chunks, **options) == expected


@pytest.mark.parametrize(
    "body",
    ["", "<b>", "two words", "n" * 5000, "now<arg_key>x</arg_key>", "now{}"],
)
def test_what_is_no_call_with_keys_and_values_stays_text(body: str) -> None:
    text = f"see <tool_call>{body}</tool_call> there"
    assert taken_apart([text], tools=TOOLS, notation=LING) == ("", text, [])
    assert taken_apart(list(text), tools=TOOLS, notation=LING) == ("", text, [])
    later = ("", text, [("now", "{}")])
    assert taken_apart([f"{text}\n<tool_call>now</tool_call>"], tools=TOOLS, notation=LING) == later


def test_the_template_decides_unless_a_parser_is_named() -> None:
    tokenizer = byte_level()
    shown = {"<tool_call>{{ call }}": QWEN, "<|tool_call_start|>[": LFM2, "<function_calls>": OLMO3, "no tools": QWEN}
    shown |= {SECTION: KIMI, "<tool_call>{{ name }}<arg_key>": LING}
    for template, notation in shown.items():
        assert NOTATIONS[notation_name("auto", tokenizer, template)] is notation
        assert NOTATIONS[notation_name("hermes", tokenizer, template)] is QWEN
        assert NOTATIONS[notation_name("lfm2", None, template)] is LFM2
        assert NOTATIONS[notation_name("kimi_k2", None, template)] is KIMI
        assert NOTATIONS[notation_name("ling3", None, template)] is LING
        assert NOTATIONS[notation_name("glm47", None, template)] is LING
    for notation in (KIMI, LFM2):
        tokenizer.backend.add_special_tokens([notation.opening])
        assert NOTATIONS[notation_name("auto", tokenizer, "no tools")] is notation


def served(tokenizer: Tokenizer, template: str) -> Texts:
    texts = Texts(EngineConfig.from_flat(model="none"), ServerConfig(served_model_name=("none",)))
    texts.tokenizer = Tokenizer.wrap(tokenizer.hf)
    texts._chat = ChatTemplate(texts.tokenizer, template)
    texts.begin(Facts(tokenizer.backend.get_vocab_size(), 512, frozenset()))
    return texts


@pytest.mark.parametrize(
    ("notation", "call"),
    [
        (LFM2, f"{LFM2.opening}[now()]{LFM2.closing}"),
        (KIMI, kimi(("functions.now:0", "{}"))),
        (QWEN, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ],
)
def test_tags_that_are_special_tokens_are_asked_for(notation: Notation, call: str) -> None:
    tokenizer = byte_level()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": [notation.opening, notation.closing]})
    texts = served(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert texts.tokenizer is not None
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert PreparedTurn.read(texts, ChatBody(**body)).params.skip_special_tokens
    now = {"type": "function", "function": {"name": "now"}}
    turn = pickle.loads(pickle.dumps(PreparedTurn.read(texts, ChatBody(**body, tools=[now]))))
    ids = texts.tokenizer.encode(f"So {call}")
    text = texts.tokenizer.decode(ids, skip_special_tokens=turn.params.skip_special_tokens)
    assert turn.parser().feed(text) == [Content("So"), CallPart(0, "now", "{}")]


def test_thinking_between_special_tokens_is_told() -> None:
    tokenizer = byte_level()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    texts = served(tokenizer, "{{ messages[0].content }}<think>")
    assert texts.tokenizer is not None
    turn = PreparedTurn.read(texts, ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]}))
    ids = texts.tokenizer.encode("hm</think>so")
    text = texts.tokenizer.decode(ids, skip_special_tokens=turn.params.skip_special_tokens)
    assert turn.parser().feed(text) == [Reasoning("hm"), Content("so")]


def test_kimi_sees_the_function_in_the_id_of_a_call() -> None:
    show = "{% for c in m.tool_calls or () %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} "
    show += "{{ m.content if m.role == 'user' }}"
    calls = [{"id": f"call_{at}", "type": "function", "function": {"name": name}} for at, name in enumerate(["f", "g"])]
    answers = [{"role": "tool", "tool_call_id": f"call_{at}", "content": "1"} for at in (1, 0)]
    again = [{"role": "assistant", "tool_calls": [{"id": "functions.f:7", "function": {"name": "f"}}]}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, *answers, *again]
    for mark, expected in (
        (SECTION, "functions.f:0 functions.g:1   functions.g:1  functions.f:0  functions.f:2"),
        ("", "call_0 call_1   call_1  call_0  functions.f:7"),
    ):
        texts = served(byte_level(), f"{{# {mark} #}}{{% for m in messages %}}{show}{{% endfor %}}")
        assert texts.tokenizer is not None
        turn = PreparedTurn.read(texts, ChatBody.model_validate({"messages": messages}))
        text = texts.tokenizer.decode(turn.prompts[0].token_ids, skip_special_tokens=True)
        assert text.split() == expected.split()
        counted = tokenize(texts, json.dumps({"messages": messages}).encode())
        assert counted.tokens == turn.prompts[0].token_ids.tolist()

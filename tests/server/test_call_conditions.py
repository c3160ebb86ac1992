"""Answers as models write them, right and wrong, in every notation: whole, character by character, in random pieces.

The conditions are those that other servers' tests and models' own habits show. `text` is what the model says; the rest
is what a client has to get.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.server.answer import AnswerParser, CallPart, Content, Piece, Reasoning
from forkpoint.server.notations import find_notation

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
TOOLS: dict[str, Any] = {
    "run": {"type": "object", "properties": {"command": STRING, "note": STRING}},
    "weather": {"type": "object", "properties": {"city": STRING, "days": INTEGER}, "required": ["city"]},
    "now": {},
    "get-time": {"properties": {"zone": STRING}},
    "shop.order": {"properties": {"items": {"type": "array"}, "to": STRING}},
    "opt": {
        "type": "object",
        "$defs": {
            "Name": {"type": "string"},
            "Count": {"anyOf": [{"$ref": "#/$defs/Count"}, INTEGER]},
            "a/b": {"type": "boolean"},
        },
        "properties": {
            "any": {"anyOf": [STRING, NULL]},
            "list": {"type": ["string", "null"]},
            "one": {"oneOf": [NULL, STRING]},
            "all": {"allOf": [STRING]},
            "enum": {"enum": ["1", "2"]},
            "const": {"const": "7"},
            "ref": {"$ref": "#/$defs/Name"},
            "cycle": {"$ref": "#/$defs/Count"},
            "escaped": {"$ref": "#/$defs/a~1b"},
            "mixed": {"enum": [1, "auto"]},
            "maybe": {"type": ["integer", "null"]},
            "deep": {"anyOf": [{"anyOf": [NULL, {"anyOf": [{"type": "array", "items": {}}, NULL]}]}, NULL]},
            "number": {"type": "number"},
            "whole": INTEGER,
            "flag": {"type": "boolean"},
            "flags": {"anyOf": [{"type": "boolean"}, NULL]},
            "object": {"type": "object"},
            "array": {"type": "array"},
            "either": {"anyOf": [STRING, {"type": "array"}]},
            "text or number": {"type": ["string", "number"]},
            "float": {"type": "float"},
        },
    },
}


def called(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


LS, PWD = called("run", command="ls"), called("run", command="pwd")


@dataclass(frozen=True)
class Condition:
    name: str
    parser: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str = ""
    reasoning: str = ""
    inside: bool = False  # the prompt has opened the thinking


def condition(name: str, parser: str, text: str, *calls: tuple[str, dict[str, Any]], **more: Any) -> Condition:
    return Condition(name, parser, text, calls, **more)


def xml(command: str, name: str = "run") -> str:
    return f"<function={name}>\n<parameter=command>\n{command}\n</parameter>\n</function>"


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def hermes(command: str, name: str = "run") -> str:
    return json.dumps({"name": name, "arguments": {"command": command}})


def opt(**parameters: str) -> str:
    return tagged(
        "<function=opt>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
        + "</function>"
    )


XML = [
    condition("plain text", "qwen3_coder", "No call here.", content="No call here."),
    condition("one call", "qwen3_coder", tagged(xml("ls")), LS),
    condition("text before", "qwen3_coder", f"I look.\n\n{tagged(xml('ls'))}", LS, content="I look."),
    condition("text behind", "qwen3_coder", f"{tagged(xml('ls'))}\n\nDone.", LS, content="Done."),
    condition("text around", "qwen3_coder", f"I look.{tagged(xml('ls'))} Done.", LS, content="I look.Done."),
    condition("two calls", "qwen3_coder", f"{tagged(xml('ls'))}\n{tagged(xml('pwd'))}", LS, PWD),
    condition("two calls, no white space", "qwen3_coder", tagged(xml("ls")) + tagged(xml("pwd")), LS, PWD),
    condition(
        "values in a line",
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Ulm</parameter><parameter=days>3</parameter></function></tool_call>",
        called("weather", city="Ulm", days=3),
    ),
    condition("no parameters", "qwen3_coder", tagged("<function=now>\n</function>"), called("now")),
    condition(
        "no parameters, one line", "qwen3_coder", "<tool_call><function=now></function></tool_call>", called("now")
    ),
    condition(
        "empty value",
        "qwen3_coder",
        tagged("<function=run><parameter=command></parameter></function>"),
        called("run", command=""),
    ),
    condition("value of a line end", "qwen3_coder", tagged(xml("")), called("run", command="")),
    condition("lines are kept", "qwen3_coder", tagged(xml("\n  a\n\n b\n")), called("run", command="\n  a\n\n b\n")),
    condition(
        "quotes and backslashes",
        "qwen3_coder",
        tagged(xml('say "x" C:\\dir\t\u00e9')),
        called("run", command='say "x" C:\\dir\t\u00e9'),
    ),
    condition(
        "other tags in a value",
        "qwen3_coder",
        tagged(xml("<b>x</b> < > </ <!-- -->")),
        called("run", command="<b>x</b> < > </ <!-- -->"),
    ),
    condition(
        "its own end in a value",
        "qwen3_coder",
        tagged(xml("a </parameter> b")),
        called("run", command="a </parameter> b"),
    ),
    condition(
        "the call's end in a value",
        "qwen3_coder",
        tagged(xml("a </tool_call> b </function> c")),
        called("run", command="a </tool_call> b </function> c"),
    ),
    condition(
        "a beginning in a value",
        "qwen3_coder",
        tagged(xml("grep '<tool_call>' <function=x>")),
        called("run", command="grep '<tool_call>' <function=x>"),
    ),
    condition(
        "ends of calls on lines of a value",
        "qwen3_coder",
        tagged(xml("</tool_call>\n</tool_call>\n")),
        called("run", command="</tool_call>\n</tool_call>\n"),
    ),
    condition(
        "an unknown parameter's tag in a value",
        "qwen3_coder",
        tagged(xml("x\n<parameter=other>\ny")),
        called("run", command="x\n<parameter=other>\ny"),
    ),
    condition(
        "a code block in a value",
        "qwen3_coder",
        tagged(xml("```py\nprint(1)\n```")),
        called("run", command="```py\nprint(1)\n```"),
    ),
    condition(
        "parameter unclosed before another",
        "qwen3_coder",
        tagged("<function=run>\n<parameter=command>\nls\n<parameter=note>\nlist\n</parameter>\n</function>"),
        called("run", command="ls", note="list"),
    ),
    condition(
        "parameter unclosed before the end",
        "qwen3_coder",
        tagged("<function=run>\n<parameter=command>\nls\n</function>"),
        LS,
    ),
    condition(
        "drifted end of a parameter",
        "qwen3_coder",
        tagged("<function=run>\n<parameter=command>\nls\n</parameter1>\n</function>"),
        LS,
    ),
    condition(
        "end of a parameter cut short",
        "qwen3_coder",
        tagged("<function=run>\n<parameter=command>\nls\n</parameter\n</function>"),
        LS,
    ),
    condition(
        "no end of the function", "qwen3_coder", tagged("<function=run>\n<parameter=command>\nls\n</parameter>"), LS
    ),
    condition("no end at all", "qwen3_coder", "<tool_call>\n<function=run>\n<parameter=command>\nls", LS),
    condition("no end of the call", "qwen3_coder", "<tool_call>\n" + xml("ls"), LS),
    condition(
        "no end of the value but of the call",
        "qwen3_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\nls\n</tool_call>",
        LS,
    ),
    condition("no opening", "qwen3_coder", f"I look.\n\n{xml('ls')}\n</tool_call>", LS, content="I look."),
    condition("no tags of the call", "qwen3_coder", xml("ls"), LS),
    condition(
        "the first lacks its opening", "qwen3_coder", f"{xml('ls')}\n</tool_call>\n{tagged(xml('pwd'))}", LS, PWD
    ),
    condition("no closing between two", "qwen3_coder", f"<tool_call>\n{xml('ls')}\n{tagged(xml('pwd'))}", LS, PWD),
    condition("two functions in one", "qwen3_coder", tagged(f"{xml('ls')}\n{xml('pwd')}"), LS, PWD),
    condition("repeated opening", "qwen3_coder", f"<tool_call>\n{tagged(xml('ls'))}", LS, content="<tool_call>"),
    condition("repeated closing", "qwen3_coder", f"{tagged(xml('ls'))}\n</tool_call>", LS),
    condition("unknown function, whole", "qwen3_coder", tagged(xml("ls", "other")), called("other", command="ls")),
    condition(
        "unknown function, broken",
        "qwen3_coder",
        "<tool_call>\n<function=other>\n<parameter=a>\n1",
        content="<tool_call>\n<function=other>\n<parameter=a>\n1",
    ),
    condition(
        "no end of the function's tag",
        "qwen3_coder",
        f"<tool_call>\n<function=run\n</function>\n</tool_call>\n{tagged(xml('ls'))}",
        LS,
        content="<tool_call>\n<function=run\n</function>\n</tool_call>",
    ),
    condition(
        "nameless function",
        "qwen3_coder",
        f"<tool_call><function=></function></tool_call>{tagged(xml('ls'))}",
        LS,
        content="<tool_call><function=></function></tool_call>",
    ),
    condition(
        "quoted names",
        "qwen3_coder",
        tagged('<function="run">\n<parameter="command">\nls\n</parameter>\n</function>'),
        LS,
    ),
    condition("JSON in the function's tags", "qwen3_coder", tagged('<function=run>{"command": "ls"}</function>'), LS),
    condition(
        "a broken call and a good one",
        "qwen3_coder",
        f"<tool_call>\nwhat\n</tool_call>\n{tagged(xml('ls'))}",
        LS,
        content="<tool_call>\nwhat\n</tool_call>",
    ),
    condition(
        "an unclosed value does not take the next call",
        "qwen3_coder",
        f"<tool_call>\n<function=run>\n<parameter=command>\nls\n</tool_call>\n{tagged(xml('pwd'))}",
        LS,
        PWD,
    ),
    condition(
        "prose about the tag",
        "qwen3_coder",
        "The tag <tool_call> opens a call, </tool_call> ends it.",
        content="The tag <tool_call> opens a call, </tool_call> ends it.",
    ),
    condition(
        "prose about the tag and a call",
        "qwen3_coder",
        f"`<tool_call>` it is. {tagged(xml('ls'))}",
        LS,
        content="`<tool_call>` it is.",
    ),
    condition(
        "prose about the function's tag",
        "qwen3_coder",
        "Write <function=run> and then the rest.",
        content="Write <function=run> and then the rest.",
    ),
    condition("half a tag at the end", "qwen3_coder", "so <tool_c", content="so <tool_c"),
    condition("white space at the end", "qwen3_coder", "so \n\n", content="so \n\n"),
    condition("nemotron 3", "nemotron_v3", tagged(xml("ls")), LS),
]
TYPES = [
    *(
        condition(f"a string by {key}", "qwen3_coder", opt(**{key: value}), called("opt", **{key: value}))
        for key, value in [
            ("any", "8080"),
            ("list", "007"),
            ("one", "true"),
            ("all", "12"),
            ("enum", "1"),
            ("const", "7"),
            ("ref", "2024"),
            ("any", '{"a": 1}'),
            ("either", "12"),
            ("text or number", "5"),
            ("list", "[1]"),
            ("any", "nullable"),
        ]
    ),
    *(
        condition(f"{key} of {value}", "qwen3_coder", opt(**{key: value}), called("opt", **{key: expected}))
        for key, value, expected in [
            ("any", "null", None),
            ("list", "None", None),
            ("maybe", "null", None),
            ("maybe", "42", 42),
            ("maybe", "None", None),
            ("mixed", "1", 1),
            ("mixed", "auto", "auto"),
            ("cycle", "5", 5),
            ("escaped", "True", True),
            ("deep", '["NYC"]', ["NYC"]),
            ("deep", "null", None),
            ("number", "3.14", 3.14),
            ("number", "7", 7),
            ("number", "-1e3", -1000.0),
            ("float", "2.5", 2.5),
            ("whole", "42", 42),
            ("whole", "5.0", 5),
            ("whole", "007", 7),
            ("whole", "+3", 3),
            ("number", ".5", 0.5),
            ("whole", " 42 ", 42),
            ("whole", "many", "many"),
            ("flag", "true", True),
            ("flag", "True", True),
            ("flag", "FALSE", False),
            ("flags", "false", False),
            ("flag", "1", True),
            ("object", '{"w": 1}', {"w": 1}),
            ("object", "{'k': True, 'n': None}", {"k": True, "n": None}),
            ("object", '{"a": "x\ny"}', {"a": "x\ny"}),
            ("object", '"{\\"a\\": 1}"', {"a": 1}),
            ("object", '{"a": 1,}', {"a": 1}),
            ("array", '["a", 1, true]', ["a", 1, True]),
            ("array", "['a', False]", ["a", False]),
            ("array", "(1, 2)", [1, 2]),
            ("array", '[\n  {"a": 1}\n]', [{"a": 1}]),
            ("either", '["a"]', ["a"]),
            ("undeclared", "5", 5),
            ("undeclared", "five", "five"),
            ("undeclared", "[1]", [1]),
        ]
    ),
    condition(
        "several types",
        "qwen3_coder",
        opt(whole="1", any="1", flag="true", array="[]"),
        called("opt", whole=1, any="1", flag=True, array=[]),
    ),
]
JSON = [
    condition("JSON", "hermes", tagged(hermes("ls")), LS),
    condition("JSON in one line", "hermes", f"<tool_call>{hermes('ls')}</tool_call>", LS),
    condition("JSON with text around", "hermes", f"So: {tagged(hermes('ls'))}\nDone", LS, content="So:Done"),
    condition("two JSON calls", "hermes", tagged(hermes("ls")) + tagged(hermes("pwd")), LS, PWD),
    condition("JSON list", "hermes", f"<tool_call>[{hermes('ls')}, {hermes('pwd')}]</tool_call>", LS, PWD),
    condition("two objects in one", "hermes", tagged(f"{hermes('ls')}\n{hermes('pwd')}"), LS, PWD),
    condition(
        "no closing between JSON calls", "hermes", f"<tool_call>\n{hermes('ls')}\n{tagged(hermes('pwd'))}", LS, PWD
    ),
    condition("JSON without closing", "hermes", f"<tool_call>\n{hermes('ls')}", LS),
    condition("no tags at all", "hermes", hermes("ls"), LS),
    condition("arguments first", "hermes", tagged('{"arguments": {"command": "ls"}, "name": "run"}'), LS),
    condition("parameters", "hermes", tagged('{"name": "run", "parameters": {"command": "ls"}}'), LS),
    condition("no arguments", "hermes", tagged('{"name": "now"}'), called("now")),
    condition("null arguments", "hermes", tagged('{"name": "now", "arguments": null}'), called("now")),
    condition("empty arguments", "hermes", tagged('{"name": "now", "arguments": {}}'), called("now")),
    condition(
        "arguments in a string", "granite4", tagged('{"name": "run", "arguments": "{\\"command\\": \\"ls\\"}"}'), LS
    ),
    condition("empty arguments in a string", "granite4", tagged('{"name": "now", "arguments": "{}"}'), called("now")),
    condition("an empty string of arguments", "hermes", tagged('{"name": "now", "arguments": ""}'), called("now")),
    condition(
        "null in a string",
        "hermes",
        tagged('{"name": "now", "arguments": "null"}'),
        content=tagged('{"name": "now", "arguments": "null"}'),
    ),
    condition(
        "members before the name",
        "hermes",
        tagged('{"id": "c1", "type": "function", "name": "run", "arguments": {"command": "ls"}}'),
        LS,
    ),
    condition(
        "members behind the arguments", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"}, "id": 7}'), LS
    ),
    condition(
        "nested function",
        "hermes",
        tagged('{"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}'),
        LS,
    ),
    condition("no white space", "hermes", '<tool_call>{"name":"run","arguments":{"command":"ls"}}</tool_call>', LS),
    condition(
        "raw line end in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a\nb\tc"}}'),
        called("run", command="a\nb\tc"),
    ),
    condition(
        "escapes",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a\\nb \\"q\\" \\u00e9 \\\\"}}'),
        called("run", command='a\nb "q" \u00e9 \\'),
    ),
    condition(
        "escapes that JSON does not know",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "it\\\'s \\d+"}}'),
        called("run", command="it's \\d+"),
    ),
    condition(
        "braces in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a } ] { b"}}'),
        called("run", command="a } ] { b"),
    ),
    condition(
        "tags in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "x </tool_call> <tool_call> y"}}'),
        called("run", command="x </tool_call> <tool_call> y"),
    ),
    condition(
        "unescaped quotes",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "echo "hi" there"}}'),
        called("run", command='echo "hi" there'),
    ),
    condition(
        "Python's words and quotes",
        "hermes",
        tagged("{'name': 'opt', 'arguments': {'flag': True, 'maybe': None}}"),
        called("opt", flag=True, maybe=None),
    ),
    condition("a comma too many", "hermes", tagged('{"name": "run", "arguments": {"command": "ls",}}'), LS),
    condition(
        "doubled brackets",
        "hermes",
        tagged('{{"name": "run", "arguments": {{"command": "ls"}}}}') + "Done",
        LS,
        content="Done",
    ),
    condition(
        "doubled brackets of the call", "hermes", tagged('{{"name": "run", "arguments": {"command": "ls"}}}'), LS
    ),
    condition(
        "brackets where a key belongs",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "ls", {"note": "a"} {}, [}}'),
        called("run", command="ls", note="a"),
    ),
    condition("a bracket missing", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"}'), LS),
    condition("two brackets missing", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"'), LS),
    condition(
        "the end of a string missing", "hermes", "<tool_call>\n" + '{"name": "run", "arguments": {"command": "ls', LS
    ),
    condition(
        "a string that does not end takes no other call",
        "hermes",
        f'<tool_call>\n{{"name": "run", "arguments": {{"command": "ls</tool_call>\n{tagged(hermes("pwd"))}',
        LS,
        PWD,
    ),
    condition(
        "a bracket too many",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"]}}</tool_call>',
        called("weather", city="Ulm"),
    ),
    condition(
        "nested values",
        "hermes",
        tagged('{"name": "opt", "arguments": {"object": {"a": [1, {"b": null}]}, "array": []}}'),
        called("opt", object={"a": [1, {"b": None}]}, array=[]),
    ),
    condition("unknown function in JSON", "hermes", tagged(hermes("ls", "other")), called("other", command="ls")),
    condition(
        "broken JSON of an unknown function",
        "hermes",
        '<tool_call>{"name": "other", "arguments": {"a": 1</tool_call>',
        content='<tool_call>{"name": "other", "arguments": {"a": 1</tool_call>',
    ),
    condition("no JSON", "hermes", "<tool_call>{not json}</tool_call>", content="<tool_call>{not json}</tool_call>"),
    condition(
        "no name",
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        content='<tool_call>{"arguments": {"a": 1}}</tool_call>',
    ),
    condition(
        "arguments are no object",
        "hermes",
        '<tool_call>{"name": "run", "arguments": [1]}</tool_call>',
        content='<tool_call>{"name": "run", "arguments": [1]}</tool_call>',
    ),
    condition(
        "bad JSON and a good call",
        "hermes",
        f"<tool_call>{{x}}</tool_call>{tagged(hermes('ls'))}",
        LS,
        content="<tool_call>{x}</tool_call>",
    ),
    condition(
        "bad item and a good one",
        "nemotron_json",
        f'<TOOLCALL>[{{"name": 5}}, {hermes("ls")}]</TOOLCALL>',
        LS,
        content='<TOOLCALL>[{"name": 5},',
    ),
    condition(
        "JSON that is no call", "hermes", 'The answer is {"name": "run"}.', content='The answer is {"name": "run"}.'
    ),
    condition("a JSON answer", "hermes", '{"name": "Ann", "age": 3}', content='{"name": "Ann", "age": 3}'),
    condition("XML where JSON is usual", "hermes", tagged(xml("ls")), LS),
    condition("Granite 3", "granite", f"<|tool_call|>[{hermes('ls')}]", LS),
    condition(
        "Granite 3, several", "granite", f"So.<|tool_call|>[{hermes('ls')}, {hermes('pwd')}]", LS, PWD, content="So."
    ),
    condition(
        "Nemotron Nano 2",
        "nemotron_json",
        f"So.<TOOLCALL>[{hermes('ls')}, {hermes('pwd')}]</TOOLCALL>",
        LS,
        PWD,
        content="So.",
    ),
    condition("Nemotron Nano 2, no list", "nemotron_json", f"<TOOLCALL>{hermes('ls')}</TOOLCALL>", LS),
    condition("Nemotron Nano 2, no end", "nemotron_json", f"<TOOLCALL>[{hermes('ls')}", LS),
    condition("Jamba", "jamba", f" <tool_calls>[\n    {hermes('ls')},\n    {hermes('pwd')}\n]</tool_calls>", LS, PWD),
    condition(
        "Jamba, text before", "jamba", f"So.<tool_calls>[\n    {hermes('ls')}\n]</tool_calls>", LS, content="So."
    ),
    condition("Mistral", "mistral", f"[TOOL_CALLS] [{hermes('ls')}, {hermes('pwd')}]", LS, PWD),
    condition("Mistral, text before", "mistral", f"So[TOOL_CALLS][{hermes('ls')}]", LS, content="So"),
    condition(
        "Mistral, arguments first", "mistral", '[TOOL_CALLS] [{"arguments": {"command": "ls"}, "name": "run"}]', LS
    ),
    condition(
        "Mistral, later", "mistral", '[TOOL_CALLS]run{"command": "ls"}[TOOL_CALLS]run{"command": "pwd"}', LS, PWD
    ),
    condition(
        "Mistral, with the mark of arguments", "mistral", '[TOOL_CALLS]run[CALL_ID]x1[ARGS]{"command": "ls"}', LS
    ),
    condition("Mistral, prose", "mistral", "The mark [TOOL_CALLS] is one.", content="The mark [TOOL_CALLS] is one."),
    condition("Llama", "llama3_json", '{"name": "run", "parameters": {"command": "ls"}}', LS),
    condition("Llama, marked", "llama3_json", '<|python_tag|>{"name": "run", "parameters": {"command": "ls"}}', LS),
    condition(
        "Llama, type first", "llama3_json", '{"type": "function", "name": "run", "parameters": {"command": "ls"}}', LS
    ),
    condition(
        "Llama, in prose",
        "llama3_json",
        'Here: {"name": "run", "parameters": {"command": "ls"}} and so on',
        LS,
        content="Here:and so on",
    ),
    condition(
        "Llama, several",
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls"}}; {"name": "run", "parameters": {"command": "pwd"}}',
        LS,
        PWD,
    ),
    condition("Llama, no arguments", "llama3_json", '{"name": "now"}', content='{"name": "now"}'),
    condition(
        "Llama, an unknown function",
        "llama3_json",
        '{"name": "x", "parameters": {}}',
        content='{"name": "x", "parameters": {}}',
    ),
    condition("Llama, braces in prose", "llama3_json", "A set {1, 2} and {x}.", content="A set {1, 2} and {x}."),
    condition("Llama, Python", "pythonic", "[run(command='ls'), run(command=\"pwd\")]", LS, PWD),
    condition("Llama, a link", "pythonic", "[run](http://x) and [1]", content="[run](http://x) and [1]"),
]
START, STOP = "<|tool_call_start|>", "<|tool_call_end|>"


def lfm(body: str) -> str:
    return f"{START}{body}{STOP}"


PYTHON = [
    condition("LFM2", "lfm2", lfm("[run(command='ls')]"), LS),
    condition("LFM2, double quotes", "lfm2", lfm('[run(command="ls")]'), LS),
    condition("LFM2, text around", "lfm2", f"So. {lfm('[now()]')}\nDone.", called("now"), content="So.Done."),
    condition("LFM2, several", "lfm2", lfm("[run(command='ls'), now(), run(command='pwd')]"), LS, called("now"), PWD),
    condition(
        "LFM2, types",
        "lfm2",
        lfm("[opt(number=-2.5, flag=True, maybe=None, array=['a', 1], object={'k': [None, False]})]"),
        called("opt", number=-2.5, flag=True, maybe=None, array=["a", 1], object={"k": [None, False]}),
    ),
    condition("LFM2, JSON's words", "lfm2", lfm("[opt(flag=true, maybe=null)]"), called("opt", flag=True, maybe=None)),
    condition("LFM2, no list", "lfm2", lfm("run(command='ls')"), LS),
    condition("LFM2, white space", "lfm2", f"{START} [ run( command = 'ls' ) ] {STOP}", LS),
    condition(
        "LFM2, escapes",
        "lfm2",
        lfm(r"[run(command='it\'s \"x\" \n \\ \x41')]"),
        called("run", command='it\'s "x" \n \\ A'),
    ),
    condition(
        "LFM2, escapes that Python does not know",
        "lfm2",
        lfm(r"[run(command='\d+ \( ')]"),
        called("run", command=r"\d+ \( "),
    ),
    condition(
        "LFM2, raw line end",
        "lfm2",
        lfm("[run(command='cat << E\nimport x\nE')]"),
        called("run", command="cat << E\nimport x\nE"),
    ),
    condition("LFM2, three quotes", "lfm2", lfm('[run(command="""a "b"\nc""")]'), called("run", command='a "b"\nc')),
    condition("LFM2, raw string", "lfm2", lfm(r"[run(command=r'\n')]"), called("run", command=r"\n")),
    condition(
        "LFM2, nested quotes", "lfm2", lfm("[run(command='sed -n '3,4p' f')]"), called("run", command="sed -n '3,4p' f")
    ),
    condition(
        "LFM2, nested quotes and another",
        "lfm2",
        lfm("[run(command='sed -n '3,4p' f', note='x')]"),
        called("run", command="sed -n '3,4p' f", note="x"),
    ),
    condition(
        "LFM2, Python in quotes",
        "lfm2",
        lfm("[run(command='python3 -c \"from s import l\nprint(l(3*x, m='\\,'))\"')]"),
        called("run", command="python3 -c \"from s import l\nprint(l(3*x, m='\\,'))\""),
    ),
    condition(
        "LFM2, brackets in a string",
        "lfm2",
        lfm("[run(command='grep -F \"]\" (x')]"),
        called("run", command='grep -F "]" (x'),
    ),
    condition("LFM2, NUL", "lfm2", lfm("[run(command='a\x00b')]"), called("run", command="a\x00b")),
    condition("LFM2, leading zeros", "lfm2", lfm("[opt(whole=07, number=05)]"), called("opt", whole=7, number=5)),
    condition("LFM2, a number for a string", "lfm2", lfm("[run(command=007)]"), called("run", command="007")),
    condition("LFM2, set", "lfm2", lfm("[opt(array={'u', 'b'})]"), called("opt", array=["u", "b"])),
    condition("LFM2, tuple", "lfm2", lfm("[opt(array=(1, 2))]"), called("opt", array=[1, 2])),
    condition(
        "LFM2, dotted name",
        "lfm2",
        lfm("[shop.order(items=[{'name': 'a', 'n': 2}], to='x, y')]"),
        called("shop.order", items=[{"name": "a", "n": 2}], to="x, y"),
    ),
    condition("LFM2, dash in the name", "lfm2", lfm("[get-time(zone='CET')]"), called("get-time", zone="CET")),
    condition(
        "LFM2, keyword as parameter",
        "lfm2",
        lfm("[run(from='a', command='ls')]"),
        called("run", **{"from": "a", "command": "ls"}),
    ),
    condition("LFM2, dash in a parameter", "lfm2", lfm("[run(max-count=3)]"), called("run", **{"max-count": 3})),
    condition("LFM2, JSON", "lfm2", lfm(f"[{hermes('ls')}]"), LS),
    condition("LFM2, a comma too many", "lfm2", lfm("[run(command='ls',)]"), LS),
    condition("LFM2, no closing", "lfm2", f"{START}[run(command='ls')]", LS),
    condition("LFM2, no closing of the list", "lfm2", f"{START}[run(command='ls'){STOP}", LS),
    condition("LFM2, cut in a string", "lfm2", f"{START}[run(command='ls", LS),
    condition("LFM2, echo", "lfm2", f"{lfm('[run(command=1)]')}[run(command=1)]{STOP}", called("run", command="1")),
    condition("LFM2, echo and more", "lfm2", f"{lfm('[now()]')}[now()]{STOP}Done", called("now"), content="Done"),
    condition(
        "LFM2, bad one first", "lfm2", lfm("[bad(x=b'z'), run(command='ls')]"), LS, content=f"{START}[bad(x=b'z'),"
    ),
    condition(
        "LFM2, bad one last", "lfm2", lfm("[run(command='ls'), bad(x=b'z')]"), LS, content=f", bad(x=b'z')]{STOP}"
    ),
    condition("LFM2, unknown function", "lfm2", lfm("[other(x=1)]"), called("other", x=1)),
    condition("LFM2, no calls", "lfm2", lfm("[]"), content=lfm("[]")),
    condition(
        "LFM2, prose",
        "lfm2",
        f"The tag {START} opens a call (of f). [x](y)",
        content=f"The tag {START} opens a call (of f). [x](y)",
    ),
    condition("LFM2, positional argument", "lfm2", lfm("[run('ls')]"), content=lfm("[run('ls')]")),
    condition("OLMo 3", "olmo3", "<function_calls>run(command='ls')\nrun(command='pwd')</function_calls>", LS, PWD),
    condition(
        "OLMo 3, text", "olmo3", "So.<function_calls>\nnow()\n</function_calls>\nDone", called("now"), content="So.Done"
    ),
    condition(
        "OLMo 3, bad one first",
        "olmo3",
        "<function_calls>bad(x=b'z')\nrun(command='ls')</function_calls>",
        LS,
        content="<function_calls>bad(x=b'z')",
    ),
    condition(
        "OLMo 3, too large a number",
        "olmo3",
        "<function_calls>bad(x=1e999)\nnow()</function_calls>",
        called("now"),
        content="<function_calls>bad(x=1e999)",
    ),
    condition("OLMo 3, prose", "olmo3", "The tag <function_calls> is one.", content="The tag <function_calls> is one."),
]
SB, SE, TB, TE, AB = (
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)


def kimi(identity: str, arguments: str) -> str:
    return f"{TB}{identity}{AB}{arguments}{TE}"


CUT, OPEN = '{"command": "l', '{"command": "ls"'
KIMI = [
    condition("Kimi", "kimi_k2", f"So. {SB}{kimi('functions.run:0', json.dumps(LS[1]))}{SE}", LS, content="So."),
    condition(
        "Kimi, several",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', json.dumps(LS[1]))}{kimi('functions.run:1', json.dumps(PWD[1]))}{SE}",
        LS,
        PWD,
    ),
    condition(
        "Kimi, no prefix, white space",
        "kimi_k2",
        f"{SB}\n{TB} run:0 {AB} {json.dumps(LS[1])} {TE}\n{SE}\nDone",
        LS,
        content="Done",
    ),
    condition("Kimi, no arguments", "kimi_k2", f"{SB}{kimi('functions.now:0', '')}{SE}", called("now")),
    condition(
        "Kimi, a line end within", "kimi_k2", f"{SB}{kimi('functions.run:0', json.dumps(LS[1], indent=2))}{SE}", LS
    ),
    condition("Kimi, no number", "kimi_k2", f"{SB}{kimi('functions.run', json.dumps(LS[1]))}{SE}", LS),
    condition(
        "Kimi, bad JSON first",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', CUT)}{kimi('functions.run:1', json.dumps(LS[1]))}{SE}",
        called("run", command="l"),
        LS,
    ),
    condition("Kimi, a bracket missing", "kimi_k2", f"{SB}{kimi('functions.run:0', OPEN)}{SE}", LS),
    condition(
        "Kimi, bad id first",
        "kimi_k2",
        f"{SB}{kimi('functions.x.0', '{}')}{kimi('functions.run:1', json.dumps(LS[1]))}{SE}",
        LS,
        content=f"{SB}{kimi('functions.x.0', '{}')}",
    ),
    condition("Kimi, noise", "kimi_k2", f"{SB} now {kimi('functions.run:0', json.dumps(LS[1]))}{SE}", LS),
    condition("Kimi, no section", "kimi_k2", f"So. {kimi('functions.run:0', json.dumps(LS[1]))}", LS, content="So."),
    condition("Kimi, no ends", "kimi_k2", f"{SB}{TB}functions.run:0{AB}{json.dumps(LS[1])}", LS),
    condition(
        "Kimi, an end in a string",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', json.dumps({'command': f'a {TE} b'}))}{SE}",
        called("run", command=f"a {TE} b"),
    ),
    condition(
        "Kimi, in the thinking",
        "kimi_k2",
        f"hm\n{SB}{kimi('functions.run:0', json.dumps(LS[1]))}{SE}",
        LS,
        reasoning="hm",
        inside=True,
    ),
    condition(
        "Kimi, prose",
        "kimi_k2",
        f"The tag {SB} begins a section, and so on for a long time.",
        content=f"The tag {SB} begins a section, and so on for a long time.",
    ),
]


def ling(name: str, **parameters: str) -> str:
    pairs = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in parameters.items())
    return f"<tool_call>{name}{pairs}\n</tool_call>"


LING = [
    condition("Ling", "ling3", ling("run", command="ls"), LS),
    condition("Ling, one line", "ling3", ling("run", command="ls").replace("\n", ""), LS),
    condition("Ling, types", "ling3", ling("weather", city="7", days="3"), called("weather", city="7", days=3)),
    condition("Ling, no arguments", "ling3", "<tool_call>now</tool_call>", called("now")),
    condition(
        "Ling, several",
        "ling3",
        f"So.\n{ling('run', command='ls')}\n{ling('run', command='pwd')}",
        LS,
        PWD,
        content="So.",
    ),
    condition(
        "Ling, tags in a value",
        "ling3",
        ling("run", command="a </tool_call> <b> </arg_value> c"),
        called("run", command="a </tool_call> <b> </arg_value> c"),
    ),
    condition(
        "Ling, value unclosed",
        "ling3",
        "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>ls\n<arg_key>note</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        called("run", command="ls", note="x"),
    ),
    condition("Ling, no end", "ling3", "<tool_call>run<arg_key>command</arg_key><arg_value>ls", LS),
    condition(
        "Ling, unclosed value and another call",
        "ling3",
        f"<tool_call>run<arg_key>command</arg_key><arg_value>ls</tool_call>\n{ling('now')}",
        LS,
        called("now"),
    ),
    condition("Ling, unknown function", "ling3", ling("other", a="x"), called("other", a="x")),
    condition(
        "Ling, prose",
        "ling3",
        "Say <tool_call>name</tool_call> or <tool_call>two words</tool_call>.",
        content="Say <tool_call>name</tool_call> or <tool_call>two words</tool_call>.",
    ),
    condition(
        "Ling, line ends as \\n",
        "ling3",
        "<tool_call>run\\n<arg_key>command</arg_key>\\n<arg_value>ls</arg_value>\\n</tool_call>",
        LS,
    ),
]
THINKING = [
    condition("thinking", "hermes", "hm\n</think>\n\nSo.", content="So.", reasoning="hm", inside=True),
    condition("thinking that the model opens", "hermes", "<think>\nhm\n</think>\n\nSo.", content="So.", reasoning="hm"),
    condition("thinking that never ends", "hermes", "hm", reasoning="hm", inside=True),
    condition("empty thinking", "hermes", "<think>\n\n</think>\n\nSo.", content="So."),
    condition("thinking only", "hermes", "hm</think>", reasoning="hm", inside=True),
    condition("opened twice", "hermes", "<think>hm</think>So", content="So", reasoning="hm", inside=True),
    condition("ended twice", "hermes", "hm</think>So. </think>More.", content="So. More.", reasoning="hm", inside=True),
    condition("ended without a beginning", "hermes", "a thought</think>\nthe answer", content="a thought\nthe answer"),
    condition(
        "begins again on a line", "hermes", "a</think>b\n<think>c</think>d", content="bd", reasoning="ac", inside=True
    ),
    condition(
        "prose about the tags of thinking", "hermes", "Write <think>x</think> so.", content="Write <think>x</think> so."
    ),
    condition("a quoted end in the content", "hermes", "It ends with `</think>`.", content="It ends with `</think>`."),
    condition(
        "call in the thinking", "qwen3_coder", f"I look.\n\n{tagged(xml('ls'))}", LS, reasoning="I look.", inside=True
    ),
    condition("call begins the thinking", "qwen3_coder", tagged(xml("ls")), LS, inside=True),
    condition(
        "call in thinking that the model opened",
        "qwen3_coder",
        f"<think>I look.\n{tagged(xml('ls'))}",
        LS,
        reasoning="I look.",
    ),
    condition(
        "call in the thinking, which then ends",
        "qwen3_coder",
        f"I look.\n{tagged(xml('ls'))}\n</think>\nDone",
        LS,
        reasoning="I look.",
        content="Done",
        inside=True,
    ),
    condition(
        "JSON call in the thinking", "hermes", f"I look.\n{tagged(hermes('ls'))}", LS, reasoning="I look.", inside=True
    ),
    condition(
        "call without its opening in the thinking",
        "qwen3_coder",
        f"I look.\n{xml('ls')}",
        LS,
        reasoning="I look.",
        inside=True,
    ),
    condition(
        "call behind the thinking", "qwen3_coder", f"hm</think>{tagged(xml('ls'))}", LS, reasoning="hm", inside=True
    ),
    condition(
        "prose about a call's tag in the thinking",
        "qwen3_coder",
        "The marker is `<tool_call>` here.</think>So",
        content="So",
        reasoning="The marker is `<tool_call>` here.",
        inside=True,
    ),
    condition(
        "quoted call's tags in the thinking",
        "qwen3_coder",
        "It is `<tool_call>quoted</tool_call>` here.</think>So",
        content="So",
        reasoning="It is `<tool_call>quoted</tool_call>` here.",
        inside=True,
    ),
    condition(
        "quoted tag, then a call, in the thinking",
        "qwen3_coder",
        f"<tool_call>` quoted. {tagged(xml('ls'))}",
        LS,
        reasoning="<tool_call>` quoted.",
        inside=True,
    ),
    condition(
        "bare JSON in the thinking is none",
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls"}}</think>So',
        content="So",
        reasoning='{"name": "run", "parameters": {"command": "ls"}}',
        inside=True,
    ),
    condition(
        "thinking between calls",
        "qwen3_coder",
        f"<think>a</think>{tagged(xml('ls'))}\n<think>b</think>{tagged(xml('pwd'))}",
        LS,
        PWD,
        reasoning="ab",
    ),
    condition("prompt-closed thinking, plain answer", "hermes", "\n\nSo.", content="\n\nSo."),
]
CONDITIONS = [*XML, *TYPES, *JSON, *PYTHON, *KIMI, *LING, *THINKING]


def outcome(parser: str, chunks: list[str], *, inside: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]) of an answer that came in `chunks`."""
    reader = AnswerParser(reasoning=True, starts_inside=inside, tools=TOOLS, notation=find_notation(parser, None, ""))
    pieces: list[Piece] = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPart):
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert reader.num_calls == len(calls)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, Content)), calls


@pytest.mark.parametrize("case", CONDITIONS, ids=lambda case: case.name)
def test_condition(case: Condition) -> None:
    for chunks in ([case.text], list(case.text)):
        reasoning, content, written = outcome(case.parser, chunks, inside=case.inside)
        calls = [(name, json.loads(arguments)) for name, arguments in written]
        assert (calls, content, reasoning) == (list(case.calls), case.content, case.reasoning)


@given(st.sampled_from(CONDITIONS), st.lists(st.integers(1, 12), max_size=80))
def test_pieces_do_not_matter(case: Condition, sizes: list[int]) -> None:
    chunks, rest = [], case.text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    whole = outcome(case.parser, [case.text], inside=case.inside)
    assert outcome(case.parser, [*chunks, rest], inside=case.inside) == whole


@pytest.mark.parametrize(
    ("parser", "begin", "again", "end"),
    [
        (
            "qwen3_coder",
            "<tool_call><function=run><parameter=command>",
            "</tool_call>\n",
            "</parameter></function></tool_call>",
        ),
        ("qwen3_coder", "", "<tool_call><function=other><parameter=x>", ""),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "', '</tool_call> "b" ', '"}}</tool_call>'),
        ("llama3_json", "", '{"name": {"name": ', ""),
        ("lfm2", f"{START}[run(command='", "a 'b' ", f"')]{STOP}"),
        ("lfm2", START, "[run(command=", ""),
        ("kimi_k2", SB, f'{TB}other:0{AB}{{"a": "', ""),
    ],
)
def test_the_time_grows_with_the_length_of_the_answer(parser: str, begin: str, again: str, end: str) -> None:
    def seconds(number: int) -> float:
        text = begin + again * number + end
        started = time.process_time()
        outcome(parser, [text[start : start + 40] for start in range(0, len(text), 40)])
        return time.process_time() - started

    assert seconds(4000) < 0.05 + 8 * seconds(1000)  # four times as long; the square would be sixteen times

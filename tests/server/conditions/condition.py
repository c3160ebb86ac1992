"""An answer as a model writes it, what a client has to get, and the tools and texts that answers share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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


START, STOP = "<|tool_call_start|>", "<|tool_call_end|>"


def lfm(body: str) -> str:
    return f"{START}{body}{STOP}"


SB, SE, TB, TE, AB = (
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)


def kimi(identity: str, arguments: str) -> str:
    return f"{TB}{identity}{AB}{arguments}{TE}"


CUT, OPEN = '{"command": "l', '{"command": "ls"'

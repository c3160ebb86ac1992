"""Structural tags of calls: what free calls have to look like in a model's notation, and what their arguments match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from forkpoint.checks import listed, one_or_more
from forkpoint.engine.call_writing import NotationName
from forkpoint.server.calls.json_calls import KIMI_ARGUMENTS, KIMI_CALL, KIMI_END
from forkpoint.server.calls.schema_types import ANY, MAX_DEPTH, NAMES, TYPES, Functions, dumps, moved, resolve

Format: TypeAlias = dict[str, Any]  # a format of xgrammar's structural tags
FREE: Final[Format] = {"type": "any_text"}
ROOT: Final = "call"  # the name of a function's whole schema among the definitions of a parameter's schema
MAX_TEXTS: Final = 1000  # texts that a value between tags may be limited to


@dataclass(frozen=True, slots=True)
class CallRule:
    """What calls of a function have to match.

    `schema`: that of the arguments, None if any may come. `text`: the format of the argument `text_name`, which is the
    free text of a custom tool; None if any text may come.
    """

    name: str
    schema: Mapping[str, Any] | None = None
    text: Format | None = None
    text_name: str = ""


@dataclass(frozen=True, slots=True)
class CallFormats:
    """The tags of calls in one notation, each of which begins with the text `opening`."""

    opening: str
    tags: list[Format]

    def after_opening(self) -> Format:
        """Return the format of what follows the opening, up to the end of the tag."""
        return _any_of([{**tag, "begin": tag["begin"].removeprefix(self.opening)} for tag in self.tags])

    def alone(self) -> Format:
        """Return the format of calls without other text."""
        return _separated(self.tags, "\n")


def call_formats(notation: NotationName, rules: Sequence[CallRule]) -> CallFormats | None:
    """Return the formats of calls that match `rules`, as models of this notation write them.

    Return None for a notation whose calls cannot be described so.
    """
    write = _WRITERS.get(notation)
    return write(rules) if write is not None else None


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _any_of(elements: Sequence[Format]) -> Format:
    return {"type": "or", "elements": list(elements)}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _separated(tags: list[Format], separator: str) -> Format:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}


def _arguments(rule: CallRule) -> Format:
    """Return the format of all arguments as a JSON object."""
    return {"type": "json_schema", "json_schema": {**(rule.schema or {}), "type": "object"}}


def _object(rule: CallRule) -> Format:
    """Return the tag of a call as a JSON object."""
    return _tag(f'{{"name": {dumps(rule.name)}, "arguments": ', _arguments(rule), "}")


def _hermes(rules: Sequence[CallRule]) -> CallFormats:
    begin = '<tool_call>\n{{"name": {}, "arguments": '
    return CallFormats(
        "<tool_call>", [_tag(begin.format(dumps(rule.name)), _arguments(rule), "}\n</tool_call>") for rule in rules]
    )


def _objects(rules: Sequence[CallRule]) -> Format:
    """Return the format of calls as JSON objects in one list, without its brackets."""
    return _separated(list(map(_object, rules)), ", ")


def _list(begin: str, end: str, rules: Sequence[CallRule]) -> CallFormats:
    """Return the formats of JSON objects in one list between two tags."""
    return CallFormats(begin, [_tag(f"{begin}[", _objects(rules), f"]{end}")])


def _mistral(rules: Sequence[CallRule]) -> CallFormats:
    """Return the formats of a list of JSON objects, and of a name and arguments, which later models write."""
    begin, space, mark = "[TOOL_CALLS]", _regex(" ?"), {"type": "optional", "content": _const("[ARGS]")}
    calls = [_sequence(_const(rule.name), mark, _arguments(rule)) for rule in rules]
    listed_calls = _sequence(space, _const("["), _objects(rules), _const("]"))
    return CallFormats(begin, [_tag(begin, _any_of([listed_calls, *calls]), "")])


def _kimi(rules: Sequence[CallRule]) -> CallFormats:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    calls = [
        _sequence(
            _const(f"{KIMI_CALL}functions.{rule.name}:"),
            _regex("[0-9]{1,9}"),
            _const(KIMI_ARGUMENTS),
            _arguments(rule),
            _const(KIMI_END),
        )
        for rule in rules
    ]
    return CallFormats(begin, [_tag(begin, {"type": "plus", "content": _any_of(calls)}, end)])


def _qwen_xml(rules: Sequence[CallRule]) -> CallFormats:
    def parameter(name: str, value: Format) -> Format:
        return _tag(f"<parameter={name}>\n", value, "\n</parameter>\n")

    end = "</function>\n</tool_call>"
    tags = [_tag(f"<tool_call>\n<function={rule.name}>\n", _tagged(rule, parameter, FREE), end) for rule in rules]
    return CallFormats("<tool_call>", tags)


def _ling(rules: Sequence[CallRule]) -> CallFormats:
    def parameter(name: str, value: Format) -> Format:
        key = _const(f"<arg_key>{name}</arg_key>")
        return _sequence(line_end, key, line_end, _tag("<arg_value>", value, "</arg_value>"))

    line_end = _regex("\n?")  # some templates have it and others have not
    pair = _sequence(
        line_end, _tag("<arg_key>", FREE, "</arg_key>"), line_end, _tag("<arg_value>", FREE, "</arg_value>")
    )
    contents = [_tagged(rule, parameter, {"type": "star", "content": pair}) for rule in rules]
    tags = [
        _tag(f"<tool_call>{rule.name}", _sequence(content, line_end), "</tool_call>")
        for rule, content in zip(rules, contents, strict=True)
    ]
    return CallFormats("<tool_call>", tags)


_WRITERS: Final[Mapping[NotationName, Callable[[Sequence[CallRule]], CallFormats]]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "ling": _ling,
    "kimi": _kimi,
    "mistral": _mistral,
    "granite": partial(_list, "<|tool_call|>", ""),
    "nemotron": partial(_list, "<TOOLCALL>", "</TOOLCALL>"),
    "jamba": partial(_list, "<tool_calls>", "</tool_calls>"),
}
_WITH_TAGS: Final[frozenset[NotationName]] = frozenset({"qwen_xml", "ling"})  # they write texts as they are


def holds(notation: NotationName, rule: CallRule) -> bool:
    """Return whether calls in this notation can be held to all of `rule`. In JSON no text can follow a grammar."""
    is_grammar = rule.text is not None and rule.text["type"] == "grammar"
    return notation in (_WITH_TAGS if is_grammar else _WRITERS)


def _tagged(rule: CallRule, parameter: Callable[[str, Format], Format], free: Format) -> Format:
    """Return the format of arguments between tags, in the schema's order. Optional ones may be missing.

    `free` is the format of any arguments.
    """
    if rule.text is not None:
        return parameter(rule.text_name, rule.text)
    schema = rule.schema
    properties = schema.get("properties", {}) if schema is not None else None
    if schema is None or not isinstance(properties, Mapping) or schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
        return free
    values = _Values(rule.name, schema)
    required = listed(schema.get("required"))
    elements = []
    for name, part in properties.items():
        element = parameter(name, values.value(name, part))
        elements.append(element if name in required else {"type": "optional", "content": element})
    return _sequence(*elements) if elements else _const("")


class _Values:
    """The formats of one function's values between tags, where strings have no quotation marks."""

    def __init__(self, function: str, schema: Mapping[str, Any]) -> None:
        self._function = function
        self._schema = schema
        self._functions = Functions({function: schema})
        self._known: dict[str, list[str] | None] = {}  # texts by reference, so that each is followed once

    def value(self, name: str, part: Any) -> Format:
        """Return the format of the value of the property `name`, whose schema is `part`."""
        texts = self._texts(part, 0)
        if texts:
            return _any_of([_const(text) for text in dict.fromkeys(texts)])
        types = self._functions.parameter(self._function, name).types
        if types == ANY or "string" in types:
            return FREE
        if "$ref" in dumps(part):
            place = f"/$defs/{ROOT}"
            part = {**moved(part, place), "$defs": {ROOT: moved(self._schema, place)}}
        return {"type": "json_schema", "json_schema": part}

    def _texts(self, part: Any, depth: int) -> list[str] | None:
        """Return the texts of all values that a schema allows; None if they are not a short list."""
        if not isinstance(part, Mapping) or depth > MAX_DEPTH:
            return None
        if isinstance(reference := part.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = None
                self._known[reference] = self._texts(resolve(reference, self._schema), depth + 1)
            return self._known[reference]
        if "const" in part or isinstance(part.get("enum"), list):
            values = [part["const"]] if "const" in part else part["enum"]
            types = frozenset().union(*(NAMES.get(str(name), ANY) for name in one_or_more(part.get("type")))) or ANY
            fitting = (value for value in values if TYPES.get(type(value), ANY) & types)
            return [value if isinstance(value, str) else dumps(value) for value in fitting]
        if part.get("type") == "null":
            return ["null"]
        choices = part.get("anyOf", part.get("oneOf"))
        if not isinstance(choices, list):
            return None
        found: list[str] = []
        for choice in choices:
            texts = self._texts(choice, depth + 1)
            if texts is None or len(found) + len(texts) > MAX_TEXTS:
                return None
            found += texts
        return found

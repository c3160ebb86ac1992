"""One tool call as Qwen and Ling models write it, read as it comes.

Three notations are in use between `<tool_call>` and `</tool_call>`: a JSON object with `name` and `arguments`,
`<function=NAME>` with one `<parameter=KEY>` after the other (Qwen3-Coder, Qwen3.5), and those of Ling 3.

A call that has been told cannot be taken back. So a call that the model writes freely is told when it is whole;
one that a grammar enforces cannot break, and is told as it comes.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

CALL, CALL_END = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
FUNCTION_TAG, FUNCTION_END = "<function=", "</function>"
PARAMETER_TAG, PARAMETER_END = "<parameter=", "</parameter>"
FUNCTION = re.compile(FUNCTION_TAG + r"([^>\n]+)>")
PARAMETER = re.compile(PARAMETER_TAG + r"([^>\n]+)>")
LING_TAG, LING_PARAMETER = "<arg_key>", re.compile(r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>")
LING_NAME = re.compile(r"([\w.-]{1,256})(?:\s|\\n)*(?=<)")  # the model writes the line end as \n too
LING_NAME_BEGUN = re.compile(r"[\w.-]{0,256}(?:\s|\\n){0,8}\\?")
OUTSIDE_STRINGS = re.compile(r"[\s{}\[\]:,0-9+\-.eEtrufalsn\"]")  # all that JSON has there


class NotACallError(Exception):
    """What has been read can no longer become a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the text of a JSON object; `rest` the text behind the call."""

    name: str
    arguments: str
    rest: str


class OneCallReader(ABC):
    """Reads what follows an opening tag until it is a whole call, or can no longer become one."""

    end = CALL_END

    def __init__(self, tools: Mapping[str, Any], closing: str) -> None:
        """`tools`: parameter schemas by name of the function."""
        self.text = ""
        self._tools = tools
        self._scan = ObjectScan()
        self._position = 0  # in `text`: where reading goes on
        self._name: str | None = None  # of the function, where it has come by itself
        self._read: tuple[str, str] | None = None  # name and arguments, where only the call's end may be missing

    def feed(self, text: str, final: bool) -> tuple[Call, ...] | None:
        """One call, once it is whole; see `notations.CallReader`."""
        self.text += text
        self._read = self._read or self._read_body()
        rest = self._rest(final) if self._read is not None else None
        if self._read is None or rest is None:
            if final:
                raise NotACallError
            return None
        return (Call(*self._read, rest),)

    @abstractmethod
    def _read_body(self) -> tuple[str, str] | None:
        """Name and arguments, with the position behind them; None while more may come. Raises NotACallError."""

    def _rest(self, final: bool) -> str | None:
        """The text behind the tag that ends the call, which may be missing in a `final` text; None where it may still
        come. Raises NotACallError where it cannot."""
        if self._next(self.end) is None:
            return "" if final and self._position == len(self.text) else None
        return self.text[self._position + len(self.end) :]

    def _next(self, *tags: str) -> str | None:
        """Which of `tags` comes next, behind white space; None where that has not come. Raises NotACallError where
        none of them can."""
        self._skip_space()
        for tag in tags:
            if self.text.startswith(tag, self._position):
                return tag
        begun = self.text[self._position : self._position + max(map(len, tags))]
        if not any(tag.startswith(begun) for tag in tags):
            raise NotACallError
        return None

    def _skip_space(self) -> None:
        while self._position < len(self.text) and self.text[self._position].isspace():
            self._position += 1

    def _object(self) -> str | None:
        """The JSON object that begins here, read over; None where its end has not come."""
        start, end = self._position, self._scan.find_end(self.text, self._position)
        if not self._scan.closed:
            return None
        self._position = end
        return self.text[start:end]


class FreeCallReader(OneCallReader):
    """Of what follows `<tool_call>`."""

    parameter, parameter_tag, parameter_end = PARAMETER, PARAMETER_TAG, PARAMETER_END

    def __init__(self, tools: Mapping[str, Any], closing: str) -> None:
        super().__init__(tools, closing)
        self._members: list[str] = []  # arguments so far, in the second notation
        self._sought = 0  # in `text`: where the end of a parameter has been looked for
        self._closed = -1  # where a closing tag stands in that parameter

    def _read_body(self) -> tuple[str, str] | None:
        if self._name is None:
            tag = self._next("{", FUNCTION_TAG)
            if tag == "{":
                text = self._object()
                return None if text is None else _read_json(text)
            function = FUNCTION.match(self.text, self._position)
            if function is None:
                if tag is not None and "\n" in self.text[self._position :]:
                    raise NotACallError
                return None
            self._name, self._position = function[1].strip(), function.end()
        return self._read_members(self._name)

    def _read_members(self, function: str) -> tuple[str, str] | None:
        while self._read_parameter(function):
            pass
        tag = self._next(FUNCTION_END, CALL_END, self.parameter_tag)
        if tag is None or tag == self.parameter_tag:
            return None
        self._position += len(FUNCTION_END) if tag == FUNCTION_END else 0
        return function, "{" + ", ".join(self._members) + "}"

    def _read_parameter(self, function: str) -> bool:
        """Whether a whole one came next."""
        self._skip_space()
        head = self.parameter.match(self.text, self._position)
        if head is None:
            return False
        end = self._value_end(head.end())
        if end < 0:
            return False
        key, value = head[1].strip(), _without_line_ends(self.text[head.end() : end])
        self._members.append(f"{json.dumps(key, ensure_ascii=False)}: {self._value(function, key, value)}")
        self._position = end + len(self.parameter_end)
        return True

    def _value_end(self, start: int) -> int:
        """Where the parameter's value ends that begins at `start`; -1 where that has not come.

        Reads on where the last call stopped. Raises NotACallError for a call that ended without ending its parameter.
        """
        unread = max(start, self._sought)
        end = self.text.find(self.parameter_end, unread)
        until = end if end >= 0 else len(self.text)
        if self._closed < start:
            self._closed = self.text.find(CALL_END, unread, until)
        if self._closed >= start and self.text.find(CALL, max(self._closed, unread), until) >= 0:
            raise NotACallError  # another call began
        self._sought = max(start, until - len(self.parameter_end))  # the longest tag may have come in part
        return end

    def _value(self, function: str, key: str, text: str) -> str:
        """`text` as JSON: as the function's schema declares `key`, else as what it looks like."""
        schema = self._tools.get(function) or {}
        declared = (schema.get("properties") or {}).get(key) if isinstance(schema, Mapping) else None
        kind = declared.get("type") if isinstance(declared, Mapping) else None
        if kind == "string":
            return json.dumps(text, ensure_ascii=False)
        if kind == "boolean" and text in ("True", "False"):  # as templates show those of earlier calls
            return text.lower()
        try:
            return json.dumps(strict_json(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)


class LingCallReader(FreeCallReader):
    """The same of Ling 3's: the function's name, then `<arg_key>` and `<arg_value>` of each argument."""

    parameter, parameter_tag, parameter_end = LING_PARAMETER, LING_TAG, "</arg_value>"

    def _read_body(self) -> tuple[str, str] | None:
        if self._name is None:
            self._skip_space()
            name = LING_NAME.match(self.text, self._position)
            if name is None:
                if LING_NAME_BEGUN.fullmatch(self.text, self._position) is None:
                    raise NotACallError
                return None
            self._name, self._position = name[1], name.end()
        return self._read_members(self._name)


class ForcedCallReader:
    """Reads an answer that a grammar makes one JSON call without tags, and tells it as it comes."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._text = ""
        self._position = 0
        self._scan = ObjectScan()

    def feed(self, text: str) -> tuple[str | None, str]:
        """Read on: (the name when it is new, the arguments that are new)."""
        self._text += text
        name = None
        if self.name is None:
            head = HEAD.match(self._text)
            if head is None:
                return None, ""
            name = self.name = str(json.loads(head[1]))
            self._position = head.end()
        if self._scan.closed:
            return name, ""
        start, self._position = self._position, self._scan.find_end(self._text, self._position)
        return name, self._text[start : self._position]


class ObjectScan:
    """Finds the end of a JSON object, over several calls."""

    def __init__(self) -> None:
        self.closed = False
        self._position: int | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str, start: int) -> int:
        """The position after the object that begins at `start`, or the end of the text where that has not come.

        Reads on where the last call stopped. Raises NotACallError for what no JSON can hold.
        """
        position = start if self._position is None else self._position
        while position < len(text) and not self.closed:
            self._read(text[position])
            position += 1
        self._position = position
        return position

    def _read(self, char: str) -> None:
        if self._in_string:
            if char < " ":
                raise NotACallError
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif OUTSIDE_STRINGS.match(char) is None:
            raise NotACallError
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.closed = self._depth == 0


def _read_json(text: str) -> tuple[str, str]:
    """Raises NotACallError for what names no function, or gives no object of arguments."""
    call = call_json(text)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise NotACallError
    head = HEAD.match(text)
    if head is not None and isinstance(arguments, dict):  # as it was written: numbers keep their digits
        return name, text[head.end() : json.JSONDecoder().raw_decode(text, head.end())[1]]
    if isinstance(arguments, str):
        arguments = call_json(arguments or "{}")
    if arguments is not None and not isinstance(arguments, dict):
        raise NotACallError
    return name, json.dumps(arguments or {}, ensure_ascii=False)


def call_json(text: str) -> Any:
    """What the JSON of a call says. Raises NotACallError for what is none."""
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        raise NotACallError from None


def strict_json(text: str) -> Any:
    """JSON and nothing beyond it. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _without_line_ends(text: str) -> str:
    """One line end at each side belongs to the notation, not to the value."""
    return text.removeprefix("\n").removesuffix("\n")

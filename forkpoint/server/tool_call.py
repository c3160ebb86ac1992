"""One tool call as Qwen models write it, read as it comes.

Two notations are in use between `<tool_call>` and `</tool_call>`: a JSON object with `name` and `arguments`,
and `<function=NAME>` with one `<parameter=KEY>` after the other (Qwen3-Coder, Qwen3.5).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
FUNCTION_END = "</function>"


class ToolCallReader:
    """Feed it the text after the opening tag; `take` gives the name and JSON arguments as they become certain.

    `end_tag` None: the call ends with its text. `name` stays None, and `text` is all that was read, where the
    text is no call.
    """

    def __init__(self, tools: Mapping[str, Any], end_tag: str | None) -> None:
        self.name: str | None = None
        self.text = ""
        self._tools = tools
        self._end_tag = end_tag
        self._position = 0  # in `text`: where reading goes on
        self._arguments = ""
        self._told_name = False
        self._notation: str | None = None
        self._scan = _ObjectScan()
        self._num_parameters = 0
        self._closed = False  # the arguments are complete

    def take(self) -> tuple[str | None, str]:
        """(the name when it is new, the arguments that are new)."""
        name = self.name if not self._told_name else None
        self._told_name = self.name is not None
        arguments, self._arguments = self._arguments, ""
        return name, arguments

    def feed(self, text: str, final: bool) -> str | None:
        """Read on. Returns the text behind the closing tag once the call is complete, None before."""
        self.text += text
        if self._notation is None:
            self._recognise()
        match self._notation:
            case "json" if not self._closed:
                self._read_object()
            case "xml" if not self._closed:
                self._read_parameters()
        return self._end(final)

    def _recognise(self) -> None:
        head = HEAD.match(self.text)
        if head is not None:
            self._notation, self._position = "json", head.end()
            self.name = str(json.loads(head[1]))
            return
        function = FUNCTION.match(self.text)
        if function is not None:
            self._notation, self._position = "xml", function.end()
            self.name = function[1].strip()
            self._arguments = "{"

    def _read_object(self) -> None:
        end = self._scan.find_end(self.text, self._position)
        self._closed = self._scan.closed
        self._arguments += self.text[self._position : end]
        self._position = end

    def _read_parameters(self) -> None:
        while (found := PARAMETER.match(self.text, self._position)) is not None:
            key, value = found[1].strip(), _without_line_ends(found[2])
            separator = ", " if self._num_parameters else ""
            self._arguments += f"{separator}{json.dumps(key)}: {self._value(key, value)}"
            self._num_parameters += 1
            self._position = found.end()
        rest = self.text[self._position :].lstrip()
        if rest.startswith(FUNCTION_END) or (self._end_tag and rest.startswith(self._end_tag)):
            self._arguments += "}"
            self._closed = True

    def _value(self, key: str, text: str) -> str:
        """`text` as JSON: as the function's schema declares `key`, else as what it looks like."""
        schema = self._tools.get(self.name or "") or {}
        declared = (schema.get("properties") or {}).get(key) if isinstance(schema, Mapping) else None
        if isinstance(declared, Mapping) and declared.get("type") == "string":
            return json.dumps(text, ensure_ascii=False)
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)

    def _end(self, final: bool) -> str | None:
        """Where the call is complete, or cannot be any more: what follows it."""
        at = -1
        if self._end_tag is not None and (self._notation is None or self._closed):
            at = self.text.find(self._end_tag, self._position)
        if at < 0 and not final:
            return None
        end = len(self.text) if at < 0 else at
        if self._notation is None:
            self._read_whole(self.text[:end])
        elif self._notation == "xml" and not self._closed:
            self._arguments += "}"  # cut off: what has been told stays JSON
        if at < 0:
            return ""
        rest = self.text[at + len(self._end_tag or "") :]
        self.text = self.text[: at + len(self._end_tag or "")]
        return rest

    def _read_whole(self, text: str) -> None:
        """JSON in an order, or with arguments, that cannot be told piece by piece."""
        try:
            call = json.loads(text)
        except ValueError:
            return
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        self.name = call["name"]
        self._arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


class _ObjectScan:
    """Finds the end of a JSON object, over several calls."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str, start: int) -> int:
        """The position after the object's last brace, or the end of the text where that has not come."""
        for position in range(start, len(text)):
            char = text[position]
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return position + 1
        return len(text)


def _without_line_ends(text: str) -> str:
    """One line end at each side belongs to the notation, not to the value."""
    return text.removeprefix("\n").removesuffix("\n")

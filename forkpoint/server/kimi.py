"""Tool calls as Kimi writes them: in a section, each an id that names the function, and its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forkpoint.server.tool_call import Call, NotACallError, OneCallReader, strict_json

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
ID = re.compile(r"\s*(?:functions\.)?([^\s<>:]+):\d+\s*")
ID_BEGUN = re.compile(r"\s*[^\s<>:]{0,256}(?::\d{0,9})?\s?")


class KimiCallReader(OneCallReader):
    """Of what follows the section's opening tag; what follows that call is handed back behind another one."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()

    def _read(self, final: bool) -> Call | None:
        if self._name is None:
            self._read_head()
            if self._name is None:
                return None
        self._skip_space()
        start, begun = self._position, self.text[self._position : self._position + len(CALL_END)]
        if begun.startswith("{"):
            end = self._scan.find_end(self.text, start)
            rest = self._behind(end, final) if self._scan.closed else None
        elif CALL_END.startswith(begun):
            end = start
            rest = self._behind(end, final) if begun else None
        else:
            raise NotACallError
        return None if rest is None else Call(self._name, _checked(self.text[start:end] or "{}"), rest)

    def _read_head(self) -> None:
        """Up to the arguments, where all that has come."""
        begun = self.text.lstrip()
        if not begun.startswith(CALL):
            if not CALL.startswith(begun):
                raise NotACallError
            return
        given, _, tag = begun[len(CALL) :].partition("<")
        if begun[len(CALL) + len(given) :].startswith(ARGUMENTS):
            head = ID.fullmatch(given)
            if head is None:
                raise NotACallError
            self._name = head[1]
            self._position = self.text.index(ARGUMENTS) + len(ARGUMENTS)
        elif ID_BEGUN.fullmatch(given) is None or not ARGUMENTS[1:].startswith(tag):
            raise NotACallError

    def _behind(self, position: int, final: bool) -> str | None:
        """The text behind the call; None where its tag, or what comes next, may still come."""
        behind = self.text[position:].lstrip()
        if not behind.startswith(CALL_END):
            if not CALL_END.startswith(behind):
                raise NotACallError
            return "" if final and not behind else None
        rest = behind[len(CALL_END) :]
        following = rest.lstrip()
        if following.startswith(SECTION_END):
            return following[len(SECTION_END) :]
        if following.startswith(CALL):
            return SECTION + following
        return None if not final and (SECTION_END.startswith(following) or CALL.startswith(following)) else rest


def _checked(arguments: str) -> str:
    """Raises NotACallError for what is no JSON."""
    try:
        strict_json(arguments)
    except (ValueError, RecursionError):
        raise NotACallError from None
    return arguments


def number_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with `functions.NAME:N` as the ids of calls, N counting all of them.

    Kimi's templates show a call by its id alone, so any other id would hide which function was called.
    """
    ids: dict[Any, str] = {}
    numbered = []
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function, given = call.get("function"), call.get("id")
            if isinstance(function, Mapping):  # what is none is refused where messages are checked
                call = call | {"id": f"functions.{function.get('name')}:{num_calls}"}
                if isinstance(given, str):
                    ids[given] = call["id"]
            num_calls += 1
            calls.append(call)
        if calls:
            message = message | {"tool_calls": calls}
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in ids:
            message = message | {"tool_call_id": ids[answered]}
        numbered.append(message)
    return numbered

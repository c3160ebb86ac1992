"""Tool calls as Kimi writes them: in a section, each an id that names the function, and its arguments as JSON."""

from __future__ import annotations

import re

from forkpoint.server.tool_call import NotACallError, OneCallReader, call_json

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
ID = re.compile(r"\s*(?:functions\.)?([^\s<>:]+):\d+\s*")
ID_BEGUN = re.compile(r"\s*[^\s<>:]{0,256}(?::\d{0,9})?\s?")


class KimiCallReader(OneCallReader):
    """Of what follows the section's opening tag; what follows that call is handed back behind another one."""

    end = CALL_END

    def _read_body(self) -> tuple[str, str] | None:
        name = self._name = self._name or self._read_head()
        tag = self._next("{", CALL_END) if name is not None else None
        if name is None or tag is None:
            return None
        arguments = self._object() if tag == "{" else "{}"
        if arguments is None:
            return None
        call_json(arguments)
        return name, arguments

    def _read_head(self) -> str | None:
        """The name, with the position at the arguments, where all up to these has come."""
        if self._next(CALL) is None:
            return None
        given, less, tag = self.text[self._position + len(CALL) :].partition("<")
        if not (less + tag).startswith(ARGUMENTS):
            if ID_BEGUN.fullmatch(given) is None or not ARGUMENTS.startswith(less + tag):
                raise NotACallError
            return None
        head = ID.fullmatch(given)
        if head is None:
            raise NotACallError
        self._position += len(CALL) + len(given) + len(ARGUMENTS)
        return head[1]

    def _rest(self, final: bool) -> str | None:
        rest = super()._rest(final)
        following = (rest or "").lstrip()
        if following.startswith(SECTION_END):
            return following[len(SECTION_END) :]
        if following.startswith(CALL):
            return SECTION + following
        waits = not final and (SECTION_END.startswith(following) or CALL.startswith(following))
        return None if waits else rest

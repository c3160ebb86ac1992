"""Tool calls as Ling 3 writes them: the function's name, then `<arg_key>` and `<arg_value>` of each argument."""

from __future__ import annotations

import re

from forkpoint.server.tool_call import FreeCallReader, NotACallError

KEY_TAG, VALUE_TAG, VALUE_END = "<arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"([\w.-]{1,256})(?:\s|\\n)*(?=<)")  # the model writes the line end as \n too
NAME_BEGUN = re.compile(r"[\w.-]{0,256}(?:\s|\\n){0,8}\\?")


class LingCallReader(FreeCallReader):
    """Reads what follows `<tool_call>`, which ends as Qwen's calls do."""

    parameter = re.compile(r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>")
    parameter_tag = KEY_TAG
    parameter_end = VALUE_END

    def _read_body(self) -> tuple[str, str] | None:
        if self._name is None:
            self._skip_space()
            name = NAME.match(self.text, self._position)
            if name is None:
                if NAME_BEGUN.fullmatch(self.text, self._position) is None:
                    raise NotACallError
                return None
            self._name, self._position = name[1], name.end()
        return self._read_members(self._name)

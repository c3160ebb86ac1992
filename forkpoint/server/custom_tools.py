"""OpenAI's custom tools, whose input is a free text. The model sees each as a function with one text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from forkpoint.checks import json_value, member
from forkpoint.server.answer import CallPart, Piece

INPUT: Final = "input"  # the argument of the function that holds the free text
MAX_ESCAPE: Final = 6  # characters of the longest escape in JSON, which may be cut off


def custom_function(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function that the model sees for a custom tool, which is not checked yet.

    Its description has the tool's grammar. The schema of the text has it too if it is a regular expression.
    """
    syntax, definition = grammar_of(custom)
    text, descriptions = {"type": "string"}, [str(custom.get("description") or "")]
    if definition:
        descriptions.append(f"{INPUT} follows this {syntax} grammar:\n{definition}")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    function = {"name": custom.get("name"), "description": "\n\n".join(filter(None, descriptions)) or None}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return {**{name: value for name, value in function.items() if value is not None}, "parameters": schema}


def grammar_of(custom: Mapping[str, Any]) -> tuple[str, str]:
    """Return the syntax and the definition of a custom tool's grammar; empty texts without one."""
    form = custom.get("format")
    given = member(form, "grammar") or form
    return str(member(given, "syntax") or ""), str(member(given, "definition") or "")


def custom_arguments(text: object) -> str:
    """Return the arguments of the function that stand for a custom tool's free text."""
    return json.dumps({INPUT: text or ""}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return a custom tool's free text from the arguments of its function, or its beginning if they are cut off.

    Arguments that have another form are returned unchanged.
    """
    cut_off = (arguments[: len(arguments) - num_dropped] + '"}' for num_dropped in range(MAX_ESCAPE))
    for whole in (arguments, *cut_off):
        if isinstance(text := member(json_value(whole), INPUT), str):
            return text
    return arguments


class CustomCalls:
    """Turns calls of custom tools in one answer into calls with their free text, which comes once it is whole."""

    def __init__(self, names: Collection[str]) -> None:
        """Take the `names` of the functions that are custom tools."""
        self._names = names
        self._index = 0
        self._arguments: list[str] | None = None  # parts of the call that is being read, if its tool is a custom one

    def pieces(self, pieces: Iterable[Piece], *, is_last: bool) -> list[Piece]:
        """Return the pieces of an answer as they come. `is_last`: no more will come."""
        found: list[Piece] = []
        for piece in pieces:
            if self._arguments is not None and isinstance(piece, CallPart) and piece.name is None:
                self._arguments.append(piece.text)
                continue
            found += self._whole()
            if isinstance(piece, CallPart) and piece.name in self._names:
                self._index, self._arguments = piece.index, [piece.text]
                piece = replace(piece, text="")
            found.append(piece)
        return [*found, *(self._whole() if is_last else ())]

    def _whole(self) -> list[Piece]:
        """Return the free text of the call that is being read, as the rest of the call."""
        if self._arguments is None:
            return []
        text, self._arguments = custom_input("".join(self._arguments)), None
        return [CallPart(self._index, None, text)]

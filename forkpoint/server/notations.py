"""The notations in which families write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.server.kimi import SECTION, SECTION_END, KimiCallReader
from forkpoint.server.python_call import PythonCallReader
from forkpoint.server.tool_call import CALL, CALL_END, LING_TAG, Call, FreeCallReader, LingCallReader


class CallReader(Protocol):
    text: str

    def feed(self, text: str, final: bool) -> tuple[Call, ...] | None:
        """The calls once they are whole; None while they may still be. Raises NotACallError when they cannot.

        The closing tag may be missing where the answer ends (`final`).
        """


@dataclass(frozen=True, slots=True)
class Notation:
    """Tags around calls, and what reads what is between them: it is made of the tools' schemas and the closing tag."""

    opening: str
    closing: str
    reader: Callable[[Mapping[str, Any], str], CallReader]


QWEN: Final = Notation(CALL, CALL_END, FreeCallReader)
LING: Final = Notation(CALL, CALL_END, LingCallReader)
LFM2: Final = Notation("<|tool_call_start|>", "<|tool_call_end|>", PythonCallReader)
OLMO3: Final = Notation("<function_calls>", "</function_calls>", PythonCallReader)
KIMI: Final = Notation(SECTION, SECTION_END, KimiCallReader)


def find_notation(parser: str, tokenizer: Tokenizer | None, template: str) -> Notation:
    """That of `--tool-call-parser`; for `auto` the one whose tag the chat template or the vocabulary has."""
    if parser != "auto":
        return {"lfm2": LFM2, "olmo3": OLMO3, "kimi_k2": KIMI, "ling3": LING}.get(parser, QWEN)
    if LING_TAG in template:
        return LING
    for notation in (QWEN, LFM2, OLMO3, KIMI):
        if notation.opening in template:
            return notation
    for notation in (LFM2, KIMI):
        if tokenizer is not None and tokenizer.backend.token_to_id(notation.opening) is not None:
            return notation
    return QWEN

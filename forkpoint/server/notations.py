"""The notations in which model families write tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forkpoint.engine.call_writing import NotationName
from forkpoint.server.calls.json_calls import KIMI_CALL, KIMI_END, read_kimi, read_name_and_arguments, read_object
from forkpoint.server.calls.python_calls import read_python
from forkpoint.server.calls.reader import Notation
from forkpoint.server.calls.site import CallReader, Site
from forkpoint.server.calls.tagged_calls import CALL, CALL_END, FUNCTION_END, read_ling, read_qwen


def read_mistral(site: Site) -> CallReader:
    """Read a call of Mistral's: an object in a list, or a name and arguments. Return whether it was written in full."""
    if site.source.text.startswith("{", site.source.at):
        return (yield from read_object(site))
    return (yield from read_name_and_arguments(site))


QWEN: Final = Notation(
    CALL,
    CALL_END,
    read_qwen,
    closings=(FUNCTION_END,),
    tags=("<function=",),
    bare=r"\{",
    bare_at_start=True,
    lists=True,
)
LING: Final = Notation(CALL, CALL_END, read_ling)
LFM2: Final = Notation("<|tool_call_start|>", "<|tool_call_end|>", read_python, lists=True, repeats=True)
OLMO3: Final = Notation("<function_calls>", "</function_calls>", read_python, lists=True)
KIMI: Final = Notation(
    "<|tool_calls_section_begin|>",
    KIMI_END,
    read_kimi,
    closings=("<|tool_calls_section_end|>",),
    tags=(KIMI_CALL,),
)
GRANITE: Final = Notation("<|tool_call|>", "<|end_of_text|>", read_object, lists=True)
NEMOTRON: Final = Notation("<TOOLCALL>", "</TOOLCALL>", read_object, lists=True)
JAMBA: Final = Notation("<tool_calls>", "</tool_calls>", read_object, lists=True)
MISTRAL: Final = Notation("[TOOL_CALLS]", "", read_mistral, lists=True)
LLAMA: Final = Notation("<|python_tag|>", "<|eom_id|>", read_python, bare=r"\{|\[", lists=True)

NOTATIONS: Final[Mapping[NotationName, Notation]] = {
    "hermes": QWEN,
    "qwen_xml": QWEN,
    "ling": LING,
    "lfm2": LFM2,
    "olmo3": OLMO3,
    "kimi": KIMI,
    "granite": GRANITE,
    "nemotron": NEMOTRON,
    "jamba": JAMBA,
    "mistral": MISTRAL,
    "llama": LLAMA,
}

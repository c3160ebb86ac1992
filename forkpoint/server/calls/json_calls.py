"""Readers of calls whose arguments are JSON: an object that names the function, or an object after the name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import regex

from forkpoint.server.calls.incoming import END, Ending
from forkpoint.server.calls.json_text import strict_json
from forkpoint.server.calls.literals import literal_json
from forkpoint.server.calls.site import CallReader, Named, Site

SPACE: Final = r"\s{0,100}"
STRING: Final = r"""(?:"(?:[^"\\\n]|\\.){1,256}"|'[^'\\\n]{1,256}')"""
COLON: Final = rf"{SPACE}:{SPACE}"
COMMA: Final = rf"{SPACE},{SPACE}"

# A call up to its arguments, in the order in which it can be reported while it comes. Models double the brackets where
# their prompt shows the format so.
HEAD = regex.compile(
    rf"\{{{SPACE}(?P<doubled>\{{{SPACE})?(?:[\"'](?:type|id)[\"']{COLON}(?:{STRING}|\d{{1,9}}){COMMA}){{0,2}}"
    rf"(?P<nested>[\"']function[\"']{COLON}\{{{SPACE})?"
    rf"[\"'](?:name|function)[\"']{COLON}(?P<name>{STRING}){COMMA}[\"'](?:arguments|parameters)[\"']{COLON}(?=\{{)"
)
# The text after the arguments: further members of the object, which mean nothing, and its end, which may be missing.
MEMBERS: Final = rf"(?:{COMMA}{STRING}{COLON}(?:{STRING}|[\w.+-]{{1,64}}+)){{0,4}}{SPACE}"
NOT_CLOSED: Final = rf"(?=[^\s,}}])|{END}"
TAIL = Ending.compile(rf"{MEMBERS}(?:\}}|{NOT_CLOSED})")
NESTED_TAIL = Ending.compile(rf"{MEMBERS}(?:\}}{SPACE}(?:\}}|{NOT_CLOSED})|{NOT_CLOSED})")
# Any other object that may be a call.
OBJECT = regex.compile(
    rf"\{{{SPACE}[\"'](?:(?:name|function|type|id)[\"']{COLON}[\"'\{{\d]|(?:arguments|parameters)[\"']{COLON}[\{{\"'n])"
)
EMPTY: Final = "{}"

# The name and arguments of Mistral's later models: `name{...}`, `name[CALL_ID]...[ARGS]{...}`.
NAME_AND_ARGUMENTS = regex.compile(
    rf"{SPACE}([\w.-]{{1,256}})(?:\[CALL_ID\][^\[\s{{]{{1,64}})?(?:\[ARGS\])?{SPACE}(?=\{{)"
)
KIMI_CALL: Final = "<|tool_call_begin|>"
KIMI_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
KIMI_END: Final = "<|tool_call_end|>"
KIMI_HEAD = regex.compile(
    rf"[^<]{{0,100}}{regex.escape(KIMI_CALL)}{SPACE}(?:functions\.)?(?P<name>[^\s<>]{{1,256}}?)(?P<number>:\d{{1,9}})?{SPACE}"
    rf"{regex.escape(KIMI_ARGUMENTS)}{SPACE}(?:(?=\{{)|(?P<empty>(?={regex.escape(KIMI_END)})))"
)
KIMI_AFTER = regex.compile(rf"[^<]{{0,100}}{regex.escape(KIMI_END)}")  # text before the tag means nothing


def read_object(site: Site) -> CallReader:
    """Read `{"name": ..., "arguments": {...}}`. A call in another order is reported once it is whole.

    Return True for a call whose name is declared, even if it breaks off.
    """
    source = site.source
    head = yield from source.matched(HEAD)
    if head is None:
        return (yield from _read_whole(site))
    function, declared = site.resolve(string_value(head["name"]))
    if not declared:
        return (yield from _read_whole(site))
    source.at = head.end()
    yield Named(function)
    yield from read_arguments(site)
    tail = yield from source.matched(NESTED_TAIL if head["nested"] or head["doubled"] else TAIL)
    if tail is not None:
        source.at = tail.end()
    return True


def read_name_and_arguments(site: Site) -> CallReader:
    """Read the name of a function and the object with its arguments. Return whether it was written in full."""
    head = yield from site.source.matched(NAME_AND_ARGUMENTS)
    if head is None:
        return False
    function, declared = site.resolve(head[1])
    site.source.at = head.end()
    yield Named(function)
    return (yield from read_arguments(site, strict=not declared))


def read_kimi(site: Site) -> CallReader:
    """Read a call of Kimi's: an id, which has the function's name and the call's number, and the arguments.

    Return whether it was written in full. An undeclared bare number means the only function.
    """
    head = yield from site.source.matched(KIMI_HEAD)
    if head is None:
        return False
    function, declared = site.resolve(head["name"])
    if not declared and head["number"] is None:
        if not (function.isdecimal() and len(site.functions.names) == 1):
            return False
        function, declared = site.functions.names[0], True
    site.source.at = head.end()
    yield Named(function)
    if head["empty"] is not None:
        yield EMPTY
        return True
    sound = yield from read_arguments(site, strict=not declared)
    end = yield from site.source.matched(KIMI_AFTER)
    if end is not None:
        site.source.at = end.end()
    return sound and (end is not None or site.source.final)


def read_arguments(site: Site, *, strict: bool = False) -> CallReader:
    """Read the object with the arguments, and return whether it was written in full.

    It is closed, unless the length limit ended the answer here. `strict`: it may be no call.
    """
    arguments = site.json(strict=strict)
    yield from arguments.read(site.source)
    sound = arguments.done and arguments.sound
    if not site.source.is_cut_here:
        yield arguments.close()
    return sound


def _read_whole(site: Site) -> CallReader:
    """Read an object that can be recognised as a call only once it is whole. Return whether it is one."""
    source = site.source
    if not source.may_hold or (yield from source.matched(OBJECT)) is None:
        return False
    value = site.json(strict=True)
    parts = []
    for part in value.read(source):
        if part is None:
            yield None
        else:
            parts.append(part)
    call = _call(strict_json("".join(parts) + value.close()), site.needs_arguments)
    if call is None:
        return False
    function, declared = site.resolve(call[0])
    if not value.sound and not declared:
        return False
    yield Named(function)
    yield call[1]
    return True


def _call(value: Any, needs_arguments: bool) -> tuple[str, str] | None:
    """Return the name and the arguments (as JSON) of the call `value`, or None if it is not a call."""
    if not isinstance(value, Mapping):
        return None
    inner = value
    if isinstance(value.get("function"), Mapping):
        inner = value["function"]
    name = inner.get("name", inner.get("function"))
    given = [inner[key] for key in ("arguments", "parameters") if key in inner]
    if not isinstance(name, str) or not name or (needs_arguments and not given):
        return None
    arguments = given[0] if given else None
    if isinstance(arguments, str):  # Granite writes the object in a string
        arguments = strict_json(literal_json(arguments.strip() or EMPTY) or "")
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def string_value(written: str) -> str:
    """Return the value of a string in quotes, of either kind."""
    value = strict_json(written)
    return value if isinstance(value, str) else written[1:-1]

"""Readers of calls whose parameters are between tags, with each value as plain text."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import regex

from forkpoint.server.calls.incoming import END, Ending, Incoming
from forkpoint.server.calls.json_calls import read_arguments, read_object
from forkpoint.server.calls.json_text import escaped
from forkpoint.server.calls.schema_types import Parameter, dumps
from forkpoint.server.calls.site import CallReader, Named, Site

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
BEGIN: Final = regex.compile(CALL)
KEY: Final = r"[^<>\n]{1,256}?"
SPACE: Final = r"\s{0,200}"
NAME: Final = r"[\"']?(?P<name>[^>\"'\n<=]{1,256}?)[\"']?"
NULLS: Final = ("null", "None")


@dataclass(frozen=True, slots=True)
class Tags:
    """Patterns of a notation.

    `head`: the name of the function, up to the text that shows that it is a call. `parameter`: the tags before a value,
    with its `key`. `value_end`: matches at a "<" where a value may end, with one of these groups: `closed` is the
    value's own closing tag, `another` begins the next parameter, and `restart` begins the next call. A restart counts
    only if the value has more tags that end a call than tags that begin one. `call_end`: the tag that ends the
    function. `inner`: the beginning of a call within a value. `inner_end`: the end of that call; with the group `last`
    it is also the end of the answer, so the value ends before it. `inner_open`: matches partially what may become more
    of an `inner_end`. With `own_lines`, the notation puts a line end before and after each value.
    """

    head: Ending
    parameter: regex.Pattern[str]
    value_end: Ending
    call_end: str
    inner: regex.Pattern[str]
    inner_end: Ending
    inner_open: regex.Pattern[str]
    space: regex.Pattern[str]
    own_lines: bool


def _tags(head: str, parameter: str, value_close: str, call_end: str, space: str, own_lines: bool) -> Tags:
    key = parameter.format(key=KEY)
    named_key = parameter.format(key=f"(?P<key>{KEY})")
    begins = f"{CALL}{space}(?:{head}{space}(?:{key}|{call_end}))".replace("?P<name>", "")
    tags, over = rf"{CALL}{space}", call_end
    if call_end != CALL_END:  # the function has tags of its own
        tags, over = rf"(?:{CALL}{space})?", rf"{call_end}(?:{space}{CALL_END})?"
    inner = rf"{tags}{head}(?={space}(?:{key}|{call_end}))"
    inner_end = rf"(?P<last>(?:{value_close}{space})?{over}{space}{END})|{over}"
    structure, json = f"{key}|{call_end}|{CALL_END}|{CALL}", ""
    ends = [
        f"(?P<another>{named_key})",
        f"{CALL_END}{space}(?:{begins}|{CALL}{space}\\{{|{END})",
        f"(?P<restart>{CALL}{space}{head}{space}(?:{key}|{call_end}))",
    ]
    if call_end != CALL_END:
        structure, json = f"{structure}|{FUNCTION}", r"(?P<json>(?=\{))|"
        ends.append(f"{call_end}{space}(?:{CALL_END}|{CALL}|{FUNCTION}|{END})")
    return Tags(
        Ending.compile(f"{space}{head}{space}(?:{json}(?={structure}|{END}))"),
        regex.compile(space + named_key),
        Ending.compile("|".join([f"(?P<closed>{value_close}){space}(?:{structure}|{END})", *ends])),
        call_end,
        regex.compile(inner),
        Ending.compile(inner_end),
        regex.compile(rf"(?:{value_close}{space})?{call_end}{space}(?:{CALL_END}{space})?\0"),
        regex.compile(f"{space}(?={call_end})"),
        own_lines,
    )


QWEN_TAGS: Final = _tags(
    head=rf"<function={NAME}>",
    parameter="<parameter=[\"']?{key}[\"']?>",
    value_close=r"</parameter\w{0,20}>?",
    call_end=FUNCTION_END,
    space=SPACE,
    own_lines=True,
)
LING_TAGS: Final = _tags(
    head=r"(?P<name>[\w.-]{1,256})",
    parameter=r"<arg_key>\s{{0,20}}{key}\s{{0,20}}</arg_key>(?:\s|\\n){{0,100}}<arg_value>",
    value_close="</arg_value>",
    call_end=CALL_END,
    space=r"(?:\s|\\n){0,100}",  # the model also writes line ends as a backslash and n
    own_lines=False,
)


def read_qwen(site: Site) -> CallReader:
    """Read JSON (Hermes, Qwen3), or a function and its parameters between tags (Qwen3-Coder, Qwen3.5)."""
    if site.source.text.startswith("{", site.source.at):
        return (yield from read_object(site))
    return (yield from _read_tagged(site, QWEN_TAGS))


def read_ling(site: Site) -> CallReader:
    """Read a call of Ling's: a name, and parameters between tags. Return whether it was written in full."""
    return (yield from _read_tagged(site, LING_TAGS))


def _read_tagged(site: Site, tags: Tags) -> CallReader:
    source = site.source
    head = yield from source.matched(tags.head)
    if head is None:
        return False
    function, declared = site.resolve(head["name"].strip())
    source.at = head.end()
    if head.groupdict().get("json") is not None:
        return (yield from _read_json_in_tags(site, function, declared, tags))
    parameter = yield from source.matched(tags.parameter)
    if not declared and parameter is None and tags.call_end == CALL_END:
        return False  # a single word between the tags of a call is not a call
    yield Named(function)
    yield "{"
    separator, given = "", set[str]()
    while parameter is not None:
        key = parameter["key"].strip()
        given.add(key)
        source.at = parameter.end()
        yield f"{separator}{dumps(key)}: "
        separator = ", "
        value = _Value(site, tags, function, given, strict=not declared)
        ended = yield from _value_json(value, site.functions.parameter(function, key), source)
        if not ended and (source.cut or not declared):
            return False
        parameter = yield from source.matched(tags.parameter)
    sound = source.text.startswith(CALL_END, source.at)
    if tags.call_end != CALL_END:
        sound = yield from source.skip_tag((tags.call_end,))
    elif not sound and (space := (yield from source.matched(tags.space))) is not None:
        source.at = space.end()
        sound = source.text.startswith(CALL_END, source.at)
    if sound or not source.is_cut_here:
        yield "}"
    return sound


def _read_json_in_tags(site: Site, function: str, declared: bool, tags: Tags) -> CallReader:
    """Read `<function=name>{...}</function>`, which mixes two notations, from its object on.

    Return whether it was written in full.
    """
    yield Named(function)
    sound = yield from read_arguments(site, strict=not declared)
    ended = yield from site.source.skip_tag((tags.call_end,))
    return sound and ended


def _value_json(value: _Value, parameter: Parameter, source: Incoming) -> Generator[str | None, None, bool]:
    """Report a value as JSON, and return whether it ended. Strings are reported while they come, others at the end.

    A value that the length limit cut is reported only if it is a string, and stays open.
    """
    parts: list[str] = []
    is_reported = False
    for text in value.read():
        if text is None:
            yield None
            continue
        parts.append(text)
        if is_reported:
            yield escaped(text)
        elif parameter.is_text and not _may_be_null(parameter, parts):
            is_reported = True
            yield '"' + escaped("".join(parts))
    if is_reported:
        yield "" if source.cut and not value.ended else '"'
    elif parameter.is_text and source.cut and not value.ended:
        yield '"' + escaped("".join(parts))
    elif value.ended or not source.cut:
        yield parameter.json("".join(parts))
    return value.ended


def _may_be_null(parameter: Parameter, parts: list[str]) -> bool:
    if "null" not in parameter.types or len(parts) > 10:
        return False
    bare = "".join(parts).strip()
    return any(null.startswith(bare) for null in NULLS)


@dataclass(slots=True)
class _Value:
    """Reads the text of one value, without the line ends that the notation puts before and after it.

    Where the notation puts none, a line end before a tag that stands for a missing `value_close` is not the value's.
    """

    site: Site
    tags: Tags
    function: str
    given: set[str]  # keys of the call so far
    strict: bool  # give the call up if another one begins in the value
    ended: bool = False
    _is_closed: bool = False  # ended by its own closing tag
    _depth: int = 0  # calls that have begun in the value and not ended
    _balance: int = 0  # tags in the value that begin a call, minus tags that end one
    _is_first: bool = True

    def read(self) -> Generator[str | None, None, None]:
        """Yield the parts of the text, and None when more is needed. Set `ended` if the value ends in the answer."""
        source = self.site.source
        held = ""  # a line end that belongs to the value if more of it comes
        while (yield from source.more()):
            if source.text[source.at] == "<":
                if (yield from self._is_end()):
                    self.ended = True
                    if held and self._is_closed and not self.tags.own_lines:
                        yield held
                    return
                if self.strict and (yield from source.matched(BEGIN)) is not None:
                    return
                text = source.take((yield from self._inner_tags_end()))
            else:
                end = source.text.find("<", source.at)
                text = source.take(end if end >= 0 else len(source.text))
            whole = held + text
            text = whole.removesuffix("\n")
            held = whole[len(text) :]
            if self._is_first and self.tags.own_lines and (text or held):
                self._is_first = False
                if text.startswith("\n"):
                    text = text[1:]
                elif not text:  # the line end before the value
                    held = ""
            if text:
                yield text
        if held and source.cut:
            yield held

    def _inner_tags_end(self) -> Generator[None, None, int]:
        """Return the position after the tags here that begin or end a call within the value, or after this "<"."""
        source = self.site.source
        if self._depth and (ends := (yield from self._inner_end())) is not None:
            self._depth -= 1
            return int(ends.end())
        if (begins := (yield from source.matched(self.tags.inner))) is not None:
            self._depth += 1
            return int(begins.end())
        return source.at + 1

    def _inner_end(self) -> Generator[None, None, regex.Match[str] | None]:
        """Return the match of `inner_end` here. Wait while it might become longer, or the last one of the answer."""
        source = self.site.source
        while not source.final:
            found = self.tags.inner_open.match(source.text, source.at, partial=True)
            if found is None or not found.partial:
                break
            yield None
        return (yield from source.matched(self.tags.inner_end))

    def _is_end(self) -> Generator[None, None, bool]:
        """Return whether the value ends at this "<". The value's own closing tag is read, any other tag is not."""
        source = self.site.source
        if self._depth:
            found = yield from self._inner_end()
            if found is None or found["last"] is None:
                return False
        found = yield from source.matched(self.tags.value_end)
        if found is None:
            self._balance += source.text.startswith(CALL, source.at)
            self._balance -= source.text.startswith(CALL_END, source.at)
            return False
        if found["another"] is not None:
            key = found["key"].strip()
            return key not in self.given and self.site.functions.has_parameter(self.function, key)
        if found["restart"] is not None:
            is_restart = self._balance < 0 and self.site.resolve(found["name"].strip())[1]
            self._balance += not is_restart
            return is_restart
        if found["closed"] is not None:
            self._is_closed = True
            source.at = found.end("closed")
        return True

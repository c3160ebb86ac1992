"""Reader of calls written like Python, `f(x=1, y="a")`, with the mistakes that models make."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import regex

from forkpoint.server.calls.incoming import END, Ending, Incoming
from forkpoint.server.calls.json_calls import EMPTY, read_object
from forkpoint.server.calls.json_text import escaped, number_json
from forkpoint.server.calls.literals import literal_json
from forkpoint.server.calls.schema_types import Parameter, dumps
from forkpoint.server.calls.site import CallReader, Named, Site

SPACE: Final = r"\s{0,100}"
NAME: Final = r"[A-Za-z_][\w.-]{0,255}"
KEY: Final = r"[^\W\d][\w-]{0,127}"
HEAD = regex.compile(rf"(?P<name>{NAME}){SPACE}\({SPACE}(?:\)|(?={KEY}{SPACE}=[^=]))")
NEXT_KEY = regex.compile(rf"{SPACE}(?P<key>{KEY}){SPACE}={SPACE}(?=[^=\s])")
AFTER_VALUE = Ending.compile(rf"{SPACE}(?:,{SPACE}(?:\)|(?=[^\s)])|{END})|\))")
OPENING_QUOTE = Ending.compile(
    r"(?P<raw>[rR])?[uUfF]?(?P<quote>'''|\"\"\"|'(?='?[^']|'?@END@)|\"(?=\"?[^\"]|\"?@END@))"
)
# A quote ends a string only before such text. Any other quote is part of the string, and should have been escaped.
AFTER_STRING: Final = (
    rf"{SPACE}(?:,{SPACE}(?:{KEY}{SPACE}=[^=]|\))|\){SPACE}(?:\]|<|,{SPACE}[\w\{{]|;|\n?{NAME}{SPACE}\(|{END})|{END})"
)
STRING_ENDS: Final = {quote: Ending.compile(quote + AFTER_STRING) for quote in ("'", '"', "'''", '"""')}
TEXT_RUNS: Final = {quote: regex.compile(rf"[^\\{quote}]+") for quote in ("'", '"')}
VALUE_RUNS: Final = {**TEXT_RUNS, "": regex.compile(r"[^()\[\]{}\"',\\<]+")}  # by the open quote
ESCAPE = regex.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}(?=[^0-7])|[^xuU0-7])", regex.DOTALL
)
ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""} | {
    char: char for char in "\\'\""
}
CLOSED_BY: Final = {"(": ")", "[": "]", "{": "}"}


def read_python(site: Site) -> CallReader:
    """Read one call with named arguments, or a call as a JSON object. Strings are reported while they come.

    Return whether it was written in full.
    """
    source = site.source
    if source.text.startswith("{", source.at):
        return (yield from read_object(site))
    head = yield from source.matched(HEAD)
    if head is None:
        return False
    function, _ = site.resolve(head["name"])
    source.at = head.end()
    if head.group().endswith(")"):
        yield Named(function)
        yield EMPTY
        return True
    is_first = True
    while (key := (yield from source.matched(NEXT_KEY))) is not None:
        source.at = key.end()
        quote = yield from source.matched(OPENING_QUOTE)
        if quote is not None:
            source.at, value = quote.end(), '"'
        else:
            value = yield from _bare_value(source, site.functions.parameter(function, key["key"]), is_first)
            if not value:
                return False
        if is_first:
            yield Named(function)
        yield ("{" if is_first else ", ") + f"{dumps(key['key'])}: {value}"
        is_first = False
        if quote is not None:
            for text in _string(source, quote["quote"], raw=quote["raw"] is not None):
                yield text and escaped(text)
            if source.final and source.is_empty:
                yield "" if source.cut else '"}'
                return False
            yield '"'
        after = yield from source.matched(AFTER_VALUE)
        if after is None:
            break
        source.at = after.end()
        if after.group().endswith(")"):
            yield "}"
            return True
    if not source.is_cut_here:
        yield EMPTY if is_first else "}"
    return False


def _bare_value(source: Incoming, parameter: Parameter, is_first: bool) -> Generator[None, None, str]:
    """Read a value without quotes, and return its JSON; "" if it is cut off, or is the first and shows no call."""
    if is_first and not source.may_hold:
        return ""
    written = yield from _value(source)
    value = _json(written, parameter)
    if (value is None and is_first) or (source.final and source.is_empty and source.cut):
        return ""
    return value or dumps(written)


def _json(written: str, parameter: Parameter) -> str | None:
    """Return the JSON of a value without quotes, or None if it is none. It is a string if only a string is allowed."""
    bare = written.strip()
    if parameter.is_text and bare not in ("None", "null") and (number_json(bare) or not bare.startswith(("[", "{"))):
        return dumps(bare)
    return literal_json(bare)


def _string(source: Incoming, quote: str, *, raw: bool) -> Iterator[str | None]:
    """Yield the text of a string, and None when more text is needed. The closing quote is read too."""
    run_of = TEXT_RUNS[quote[0]]
    while (yield from source.more()):
        run = run_of.match(source.text, source.at)
        if run is not None:
            yield source.take(run.end())
        elif source.text[source.at] == "\\" and not raw:
            yield from _escape(source)
        elif source.text[source.at] == "\\":
            yield source.take(source.at + 1)
        elif (yield from source.matched(STRING_ENDS[quote])) is not None:
            source.at += len(quote)
            return
        else:
            yield source.take(source.at + 1)


def _escape(source: Incoming) -> Iterator[str | None]:
    """Yield the character that an escape means. An escape that Python does not know is left unchanged."""
    found = yield from source.matched(ESCAPE)
    if found is None:
        yield source.take(source.at + 1)
        return
    code = source.take(found.end())[1:]
    if code in ESCAPED:
        yield ESCAPED[code]
    elif code[0] in "xuU" or code.isdigit():
        number = int(code, 8) if code.isdigit() else int(code[1:], 16)
        is_character = number < 0x110000 and not 0xD800 <= number < 0xE000
        yield chr(number) if is_character else "\\" + code
    else:
        yield "\\" + code


def _value(source: Incoming) -> Generator[None, None, str]:
    """Read and return a value that does not begin with a quote, up to the comma or bracket after it."""
    parts: list[str] = []
    brackets: list[str] = []
    quote = ""
    while (yield from source.more()):
        char = source.text[source.at]
        run = VALUE_RUNS[quote].match(source.text, source.at)
        if run is not None:
            parts.append(source.take(run.end()))
            continue
        if char == "\\" and len(source.text) - source.at < 2 and not source.final:
            yield None
            continue
        if quote:
            if char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in CLOSED_BY:
            brackets.append(CLOSED_BY[char])
        elif char in ")]}" and brackets and brackets[-1] == char:
            brackets.pop()
        elif char in ")]}" or (char in ",<" and not brackets):
            break
        parts.append(source.take(min(source.at + (2 if char == "\\" else 1), len(source.text))))
    return "".join(parts)

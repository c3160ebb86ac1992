"""Converts regular expressions of ECMA-262, as in JSON schemas, to the syntax of llguidance's parser."""

from __future__ import annotations

import re
from typing import Final

_CLASS = re.compile(r"\\.|\[\^?\]?|\]|--|.", re.DOTALL)
_ASSERTION = re.compile(r"\\[^bB1-9k]|\[(?:\\.|[^\]\\])*\]|(\(\?<?[=!]|\\[bB1-9]|\\k<)", re.DOTALL)
_ASCII: Final = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}


def plain_classes(pattern: str) -> str:
    r"""Return a pattern in which `[`, `&&` and `~~` in character classes are escaped.

    `\d` and `\w` become ASCII classes. Raises ValueError for `--` in a class, look-around, `\b` and references.
    """
    for sign in filter(None, _ASSERTION.findall(pattern)):
        raise ValueError(f"{pattern[:60]!r} has {sign!r}; look-around, '\\b' and references are not supported")
    found, inside = [], False
    for token in _CLASS.findall(pattern):
        if not inside and token[0] == "[":
            if token.endswith("]"):  # `[]` matches nothing, and `[^]` matches anything
                found.append(r"[^\x{0}-\x{10FFFF}]" if token == "[]" else r"[\x{0}-\x{10FFFF}]")
                continue
            inside = True
        elif inside and token == "]":
            inside = False
        elif token in _ASCII:
            token = _ASCII[token] if inside else f"[{_ASCII[token]}]"
        elif inside and token == "--":
            raise ValueError(f"{pattern[:60]!r} has '--' in a character class; write '\\-' for the sign")
        elif inside and token[0] in "[&~":
            token = re.sub(r"[^\]]", lambda sign: "\\" + sign[0], token)
            inside = not token.endswith("]")
        found.append(token)
    return "".join(found)


_DATE = (
    r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_REFERENCE = rf"(?://{_LABEL}(?:\.{_LABEL})*(?::\d{{1,5}})?(?:/{_CHAR}*)*|(?:/?[A-Za-z0-9._~-]+(?:/{_CHAR}*)*)?)"

# Formats that the library lacks, or whose patterns are looser than what readers accept (leap seconds, 29th of
# February).
FORMATS: Final = {
    "date": f"^(?:{_DATE})$",
    "time": f"^(?:{_TIME})$",
    "date-time": f"^(?:{_DATE}T{_TIME})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+$",
    "uri-reference": rf"^{_REFERENCE}(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
}
LIBRARY_FORMATS: Final = frozenset({"duration", "hostname", "ipv4", "ipv6", "uuid", "uri"})
NOT_ENFORCED_FORMATS: Final = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "relative-json-pointer", "regex"}
)
ENCODINGS: Final = {
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base16": "^(?:[0-9A-Fa-f]{2})*$",
}

"""Rewrites JSON schemas into what llguidance enforces. Parts that cannot be enforced are refused with their place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from itertools import islice
from typing import Any, Final, NoReturn

from forkpoint.checks import listed
from forkpoint.errors import InvalidParamsError
from forkpoint.grammar.patterns import ENCODINGS, FORMATS, LIBRARY_FORMATS, NOT_ENFORCED_FORMATS, plain_classes
from forkpoint.grammar.unions import Unions, children, pointer, values_of
from forkpoint.params import OUTPUT_WORDS

MAX_DEPTH: Final = 64  # nested brackets
MAX_EXACT: Final = 2**53  # beyond it not every integer is a number of the library
MAX_LOCATED: Final = 300  # parts of a schema that are tested to find the wrong one
MAX_RELAXED: Final = 32  # keywords that are left out of a schema
_SIGNS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')
_WRONG_REGEX: Final = re.compile(
    r"regex parse error:\n    (?P<line>.*)\n    (?P<indent> *)(?P<marks>\^+)\nerror: (?P<reason>.*)"
)
_LINE = r"( |\n( {0,32}|\t{0,8}))"  # white space between two parts of a JSON text
_OPTIONS: Final = {
    True: {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    False: {"whitespace_pattern": _LINE},
}
_REFUSED: Final = (
    *("not", "if", "contains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
_DEPENDENCIES: Final = ("dependentRequired", "dependentSchemas", "dependencies")


class _Unenforceable(Exception):
    """The part of a schema at the JSON pointer `path` has a keyword that cannot be enforced."""

    def __init__(self, keyword: str, path: str, why: str) -> None:
        super().__init__(f"the JSON schema uses {keyword!r} at {path or '/'}, which {why}")
        self.keyword, self.path = keyword, path


def check_depth(text: str, name: str, signs: re.Pattern[str] = _SIGNS, levels: str = "levels") -> None:
    """Raise InvalidParamsError if brackets are nested deeper than MAX_DEPTH, without parsing the text.

    `signs` finds the brackets of another language, and texts whose brackets do not count. `name` and `levels` are words
    of the error.
    """
    depth = 0
    for sign in signs.findall(text):
        depth += (sign in ("[", "{", "(")) - (sign in ("]", "}", ")"))
        if depth > MAX_DEPTH:
            raise InvalidParamsError(
                f"{OUTPUT_WORDS[name]} is nested too deep; at most {MAX_DEPTH} {levels} are allowed"
            )


def enforceable(text: str, *, compact: bool) -> str:
    """Return the schema as text, with llguidance's options. `compact`: JSON is written as `json.dumps` does.

    Raises InvalidParamsError for a text that is not a schema, cannot be enforced, or matches nothing.
    """
    try:
        return _rewritten(text, compact=compact)
    except _Unenforceable as error:
        raise InvalidParamsError(str(error)) from error


def _rewritten(text: str, *, compact: bool) -> str:
    check_depth(text, "json")
    try:
        root = json.loads(text, parse_constant=_no_constant)
        json.dumps(root, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidParamsError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(root, dict | bool):
        raise InvalidParamsError(f"the JSON schema is {text[:40]!r}; give an object")
    found = _Rewriter(root).schema(root, "")
    if not isinstance(found, dict):
        found = {"allOf": [found]}
    return json.dumps({**found, "x-guidance": _OPTIONS[compact]})


def relaxed(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a schema without the keywords that `enforceable` refuses, and the errors about them.

    More outputs match it: where branches of `oneOf` may overlap, those of several branches too. A schema with other
    faults keeps them.
    """
    found, said = deepcopy(dict(schema)), list[str]()
    exclusive = Unions(found).exclusive
    for path, part in [*_parts(found, "")]:
        branches = listed(part.get("oneOf"))
        if not branches or path in exclusive:
            continue
        _add(part, "anyOf", part.pop("oneOf"))
        values = [value for branch in branches for value in listed(values_of(branch)) or [None]]
        if not all(isinstance(value, str) for value in values) or len({*values}) < len(values):
            said.append(str(_Unenforceable("oneOf", path, "has branches that may overlap")))
    with suppress(InvalidParamsError, LookupError, ValueError, RecursionError):
        while len(said) < MAX_RELAXED:
            try:
                _rewritten(json.dumps(found), compact=True)
                break
            except _Unenforceable as error:
                part = _part_at(found, error.path)
                del part[error.keyword]
                if error.keyword == "patternProperties":  # otherwise the names that they match would be refused
                    part.pop("additionalProperties", None)
                said.append(str(error))
    return found, said


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._unions = Unions(root)

    def schema(self, given: Any, path: str) -> Any:
        """Return a schema rewritten, parts included; `path` is its place. Raises InvalidParamsError.

        Values that are not schemas are returned unchanged, and the library refuses them.
        """
        if not isinstance(given, dict):
            return given
        found = {key: copy(value) for key, value in given.items() if key != "x-guidance"}
        self._drop_what_says_nothing(found)
        for keyword in _REFUSED:
            if keyword in found:
                _refuse(keyword, path, "cannot be enforced; express it without, or check it in the answer")
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"):
            if any(abs(number) > MAX_EXACT for number in _numbers(found.get(name))):
                _refuse(name, path, f"has a number beyond {MAX_EXACT} (2^53); enforced are smaller ones")
        for (*outer, last), child in list(children(found)):
            holder = found
            if outer:
                holder = found[outer[0]]
            holder[last] = self.schema(child, pointer(path, *outer, last))
        self._object(found, path)
        self._strings(found, path)
        self._one_of(found, path)
        return found

    def _drop_what_says_nothing(self, found: dict[str, Any]) -> None:
        nothing: dict[str, bool] = {
            "uniqueItems": found.get("uniqueItems") is False or found.get("maxItems", 2) in (0, 1),
            "if": not {"then", "else"} & set(found),
            "then": "if" not in found,
            "else": "if" not in found,
            "not": found.get("not") is False,
            "contains": found.get("minContains") == 0 and "maxContains" not in found,
            "minContains": "contains" not in found or found.get("minContains") == 0,
            "maxContains": "contains" not in found,
            "unevaluatedItems": found.get("unevaluatedItems") in (True, {}),
            "unevaluatedProperties": found.get("unevaluatedProperties") in (True, {}),
            "$dynamicAnchor": True,  # a reference to it is refused
            "propertyNames": found.get("propertyNames") in (True, {}, {"type": "string"}),
        }
        for keyword in [key for key in found if nothing.get(key)]:
            del found[keyword]
        if "unevaluatedProperties" in found and not {"$ref", "allOf", "anyOf", "oneOf", *_DEPENDENCIES} & set(found):
            found.setdefault("additionalProperties", found.pop("unevaluatedProperties"))

    # --- objects

    def _object(self, found: dict[str, Any], path: str) -> None:
        least, required = found.get("minProperties"), _strings_of(found.get("required"))
        if isinstance(least, int) and least > max(1, len(set(required))):
            _refuse("minProperties", path, "can be enforced up to the number of required properties; require them")
        if "patternProperties" in found and isinstance(found["patternProperties"], dict):
            found["patternProperties"] = {
                self._pattern(name, "patternProperties", path): child
                for name, child in found["patternProperties"].items()
            }
        if "propertyNames" in found:
            self._names(found, found.pop("propertyNames"), path)
        self._dependencies(found, path)
        declared = found.get("properties")
        if path in self._unions.forced:
            found["required"] = [*dict.fromkeys([*required, *self._unions.forced[path]])]
        if not self._unions.is_closed(path):
            return
        if isinstance(declared, dict) and declared and set(required) <= set(declared):
            found.setdefault("additionalProperties", False)
        first = found.get("prefixItems")
        least = found.get("minItems", 0)
        if isinstance(first, list) and isinstance(least, int) and least <= len(first):
            found.setdefault("items", False)

    def _names(self, found: dict[str, Any], names: Any, path: str) -> None:
        """Rewrite `propertyNames` of a schema, in place; refuse those together with properties."""
        names = self._unions.resolved(names)
        if {"properties", "patternProperties"} & set(found) or not isinstance(names, dict):
            _refuse("propertyNames", path, "cannot be enforced together with properties; leave it out")
        rest = found.pop("additionalProperties", {})
        rules = {key: value for key, value in names.items() if key not in ("type", "title", "description")}
        values = values_of(rules)
        self._strings(rules, path)
        if isinstance(values, list):
            listed = [name for name in values if isinstance(name, str)]
            if listed and {"minProperties", "maxProperties"} & set(found):  # llguidance counts no optional properties
                found["patternProperties"] = {f"^({'|'.join(map(re.escape, listed))})$": rest}
            else:
                found["properties"] = dict.fromkeys(listed, rest)
        elif set(rules) == {"pattern"}:
            found["patternProperties"] = {rules["pattern"]: rest}
        elif rules and set(rules) <= {"minLength", "maxLength"}:
            least, most = rules.get("minLength", 0), rules.get("maxLength", "")
            found["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": rest}
        else:
            _refuse("propertyNames", path, "can be enforced only with an enum, a pattern or lengths")
        found["additionalProperties"] = False

    def _dependencies(self, found: dict[str, Any], path: str) -> None:
        """Rewrite dependencies of a property, in place, as a choice: it with what it needs, or neither."""
        for keyword in _DEPENDENCIES:
            given = found.pop(keyword, {})
            if not isinstance(given, dict):
                _refuse(keyword, path, "is not an object")
            for name, needs in given.items():
                if isinstance(needs, list):
                    needs = {"required": needs}
                choice = [{"properties": {name: False}}, {"allOf": [{"required": [name]}, needs]}]
                found["allOf"] = [*found.get("allOf", []), {"anyOf": choice}]

    # --- strings

    def _strings(self, found: dict[str, Any], path: str) -> None:
        if isinstance(found.get("pattern"), str):
            found["pattern"] = self._pattern(found["pattern"], "pattern", path)
        kind = found.get("format")
        if isinstance(kind, str) and kind in NOT_ENFORCED_FORMATS:
            enforced = ", ".join(sorted([*FORMATS, *LIBRARY_FORMATS]))
            _refuse("format", path, f"is {kind!r} and cannot be enforced; enforced are {enforced}")
        if isinstance(kind, str) and kind not in LIBRARY_FORMATS:  # formats outside the specification have no effect
            del found["format"]
            if kind in FORMATS:
                _add(found, "pattern", FORMATS[kind])
        encoding = found.pop("contentEncoding", None)
        if encoding is not None:
            if str(encoding).lower() not in ENCODINGS:
                _refuse("contentEncoding", path, f"is {encoding!r}; enforced are {', '.join(ENCODINGS)}")
            _add(found, "pattern", ENCODINGS[str(encoding).lower()])

    def _pattern(self, pattern: str, keyword: str, path: str) -> str:
        try:
            return plain_classes(pattern)
        except ValueError as error:
            _refuse(keyword, path, f"cannot be enforced: {error}")

    def _one_of(self, found: dict[str, Any], path: str) -> None:
        """Turn `oneOf` into `anyOf`, in place, if its branches exclude each other. The library sees others."""
        if "oneOf" in found and path in self._unions.exclusive:
            _add(found, "anyOf", found.pop("oneOf"))


def located(text: str, complaint: Callable[[str], str]) -> NoReturn:
    """Raise InvalidParamsError for a schema of `enforceable` that the library refuses, naming the smallest wrong part.

    `complaint` returns the library's error for a schema; empty if there is none.
    """
    root = json.loads(text)
    shared = {key: root[key] for key in ("$defs", "definitions", "$schema", "$id") if key in root}
    first = complaint_in_a_line(complaint(text))

    def blamed(schema: dict[str, Any]) -> bool:
        return complaint_in_a_line(complaint(json.dumps({**shared, **schema}))) == first

    parts = [(path, part) for path, part in islice(_parts(root, ""), MAX_LOCATED) if blamed(part)]
    path, part = max(parts, key=lambda one: one[0].count("/"), default=("", root))
    if first.startswith("Unsatisfiable"):
        raise InvalidParamsError(f"the JSON schema matches nothing at {path or '/'}: {first}")
    for keyword in reversed(part):
        if not blamed({key: value for key, value in part.items() if key != keyword}) and keyword not in shared:
            raise InvalidParamsError(str(_Unenforceable(keyword, path, f"cannot be enforced: {first}")))
    raise InvalidParamsError(f"the JSON schema cannot be enforced at {path or '/'}: {first}")


def complaint_in_a_line(text: str) -> str:
    """Return llguidance's error in one line of 300 characters, without the state of its parser.

    Of a wrong regular expression this is the reason, and the part that llguidance underlines.
    """
    if found := _WRONG_REGEX.search(text):
        start, length = len(found["indent"]), len(found["marks"])
        text = f"{found['reason']} at {found['line'][start : start + length]!r}"
    return " ".join(text.partition("\n<state>")[0].split())[:300]


def _refuse(keyword: str, path: str, why: str) -> NoReturn:
    raise _Unenforceable(keyword, path, why)


def _part_at(schema: Any, path: str) -> Any:
    """Return the part at a JSON pointer. Raises LookupError or ValueError if there is none."""
    for name in path.split("/")[1:]:
        schema = schema[int(name) if isinstance(schema, list) else name.replace("~1", "/").replace("~0", "~")]
    return schema


def _add(found: dict[str, Any], keyword: str, value: Any) -> None:
    """Add a keyword to a schema, in place; next to the value that the keyword may already have."""
    if keyword in found:
        found["allOf"] = [*found.get("allOf", []), {keyword: value}]
    else:
        found[keyword] = value


def _parts(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield path, schema
        for place, child in children(schema):
            yield from _parts(child, pointer(path, *place))


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    for child in listed(value):
        yield from _numbers(child)


def _strings_of(value: Any) -> list[str]:
    return [name for name in listed(value) if isinstance(name, str)]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

"""The JSON types that a schema allows for a parameter, and the conversion of values written as text to these types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.checks import listed, one_or_more
from forkpoint.server.calls.json_text import number_json, strict_json
from forkpoint.server.calls.literals import is_json, literal_json

ANY: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
# Type names that clients write: those of JSON Schema and of programming languages.
NAMES: Final[Mapping[str, frozenset[str]]] = {
    **{name: frozenset({name}) for name in ANY},
    **dict.fromkeys(("number", "float", "double", "num"), frozenset({"number", "integer"})),
    **dict.fromkeys(("int", "long"), frozenset({"integer"})),
    **dict.fromkeys(("str", "text"), frozenset({"string"})),
    "bool": frozenset({"boolean"}),
    **dict.fromkeys(("list", "tuple"), frozenset({"array"})),
    **dict.fromkeys(("dict", "map"), frozenset({"object"})),
}
TYPES: Final[Mapping[type, frozenset[str]]] = {
    str: NAMES["string"],
    bool: NAMES["boolean"],
    int: NAMES["integer"],
    float: NAMES["number"],
    type(None): NAMES["null"],
    list: NAMES["array"],
    dict: NAMES["object"],
}
WORDS: Final = {"true": "true", "false": "false", "1": "true", "0": "false"}
MAX_DEPTH = 64  # nested schemas; request bodies have the same limit
NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
VALUES: Final = ("const", "enum", "default", "examples")  # they hold values, not schemas


@dataclass(frozen=True, slots=True)
class Parameter:
    """The values that a schema allows for one parameter.

    `types`: the allowed types, ANY if the schema does not limit them. `constants`: the values of `enum` and `const`
    that are not strings, as JSON.
    """

    types: frozenset[str] = ANY
    constants: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """Whether every allowed value is a string or null."""
        return "string" in self.types and self.types <= {"string", "null"} and not self.constants

    def json(self, text: str) -> str:
        """Return the value written as `text` in JSON, always valid.

        If strings are allowed, the value is a string, unless it is an allowed null, array or object. Without a limit on
        types JSON stays as it is.
        """
        bare = text.strip()
        if self.types == ANY:
            return bare if is_json(bare) else dumps(text)
        if "null" in self.types and bare in ("null", "None"):
            return "null"
        if bare in self.constants:
            return bare
        nested = bool(self.types & {"array", "object"}) and bare[:1] in ("[", "{", "(")
        if "string" in self.types:
            return (literal_json(bare) if nested else None) or dumps(text)
        return self._scalar(bare) or literal_json(bare) or dumps(text)

    def _scalar(self, bare: str) -> str | None:
        """Return as JSON a boolean, a number, or the value inside a JSON string; None if `bare` is none of them."""
        if "boolean" in self.types and bare.lower() in ("true", "false"):
            return bare.lower()
        if self.types & {"number", "integer"}:
            return number_json(bare, whole="number" not in self.types)
        if "boolean" in self.types:
            return WORDS.get(bare)
        if bare.startswith('"'):
            inner = strict_json(bare)
            if isinstance(inner, str):
                return literal_json(inner)
        return None


class Functions:
    """The functions that a request declares, by name, with the schemas of their parameters."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._parameters: dict[tuple[str, str], Parameter | None] = {}
        self.names = tuple(schemas)

    def declared(self, written: str) -> str | None:
        """Return the declared name that `written` means, perhaps after "functions.", or None."""
        for name in (written, written.removeprefix("functions.")):
            if name in self._schemas:
                return name
        return None

    def parameter(self, function: str, key: str) -> Parameter:
        return self._find(function, key) or Parameter()

    def has_parameter(self, function: str, key: str) -> bool:
        return self._find(function, key) is not None

    def _find(self, function: str, key: str) -> Parameter | None:
        if (function, key) not in self._parameters:
            root = self._schemas.get(function)
            schema = next(_properties(root, root, key), None)
            self._parameters[function, key] = None
            if schema is not None:
                self._parameters[function, key] = _Reading(root).parameter(schema)
        return self._parameters[function, key]


class _Reading:
    """Reads the allowed values from a schema. It follows each reference once, so the cost is linear in the schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, frozenset[str]] = {}
        self._constants: set[str] = set()

    def parameter(self, schema: Any) -> Parameter:
        types = self._types(schema, 0) or ANY
        return Parameter(types, frozenset(self._constants))

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ANY
        types = self._own_types(schema)
        if isinstance(ref := schema.get("$ref"), str):
            if ref not in self._known:
                self._known[ref] = frozenset()
                self._known[ref] = self._types(resolve(ref, self._root), depth + 1)
            if not self._known[ref]:
                return frozenset()  # a schema that contains itself adds nothing to its own types
            types = _both(types, self._known[ref])
        for word in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(word), list) and choices:
                types = _both(types, frozenset().union(*(self._types(choice, depth + 1) for choice in choices)))
        for part in listed(schema.get("allOf")):
            types = _both(types, self._types(part, depth + 1))
        return types

    def _own_types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        types = ANY
        named = schema.get("type")
        names = [name for name in one_or_more(named) if isinstance(name, str)]
        if names:
            types = frozenset().union(*(NAMES.get(name.lower(), ANY) for name in names))
        elif "properties" in schema:
            types = NAMES["object"]
        elif "items" in schema:
            types = NAMES["array"]
        values = listed(schema.get("enum"))
        if "const" in schema:
            values = [schema["const"]]
        if values:
            types = _both(types, frozenset().union(*(TYPES.get(type(value), ANY) for value in values)))
            texts = {value for value in values if isinstance(value, str)}
            self._constants |= {dumps(value) for value in values if not isinstance(value, str)} - texts
        return types


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _both(types: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    """Return the types that both schemas allow. If there are none, return the types of either."""
    return types & others or types | others


def resolve(ref: str, root: Any) -> Any:
    """Return the schema that a reference within the document `root` points to, or None."""
    if not ref.startswith("#"):
        return None
    found = root
    for part in filter(None, ref[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _properties(schema: Any, root: Any, key: str) -> Iterator[Any]:
    """Yield the schemas of the property `key` in `schema` and its parts, following references in `root`."""
    queue, seen = [schema], 0
    while queue and seen < 10_000:
        current = queue.pop(0)
        seen += 1
        if not isinstance(current, Mapping):
            continue
        properties = current.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            yield properties[key]
        if isinstance(ref := current.get("$ref"), str) and seen < MAX_DEPTH:
            queue.append(resolve(ref, root))
        for word in ("allOf", "anyOf", "oneOf"):
            queue += listed(current.get(word))


def moved(schema: Any, path: str) -> Any:
    """Return a schema that becomes a part of another one, at the JSON pointer `path`.

    Its references to itself and its own parts become references to that place. A schema with an id of its own, or a
    part with one, stays as it is, because its references count from there.
    """
    if isinstance(schema, list):
        return [moved(item, path) for item in schema]
    if not isinstance(schema, Mapping) or isinstance(schema.get("$id"), str):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = f"#{path}{value[1:]}"
        elif key in NAMED and isinstance(value, Mapping):
            found[key] = {name: moved(part, path) for name, part in value.items()}
        else:
            found[key] = value if key in VALUES else moved(value, path)
    return found

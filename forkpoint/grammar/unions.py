"""Finds facts about whole JSON schemas: unions with exclusive branches, and objects that only one schema describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from forkpoint.checks import listed

_ONE: Final = frozenset({"items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"})
_NAMED: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_LISTS: Final = frozenset({*_IN_PLACE, "prefixItems", "items"})
_OF_OBJECTS: Final = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties"}
    | {"maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    | {"items", "prefixItems", "unevaluatedItems"}
)  # fmt: skip
MAX_PASSES: Final = 100


def children(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the place (keywords and keys) and value of each schema directly inside a schema."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items() if isinstance(child, dict))
        elif key in _LISTS and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in _ONE and isinstance(value, dict):
            yield (key,), value


def pointer(path: str, *place: Any) -> str:
    return path + "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in place)


class Unions:
    """Facts about the unions of a schema. Paths are JSON pointers from the root.

    `exclusive`: paths of schemas with `oneOf` whose branches exclude each other. `forced`: properties that a schema
    must require for that.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._added_to: set[str] = set()  # targets of references to which other schemas add properties
        self._closed: set[str] = set()
        self._all_local = True
        self.exclusive: set[str] = set()
        self.forced: dict[str, list[str]] = {}
        for _ in range(MAX_PASSES):
            known = len(self._added_to)
            self._closed.clear()
            self._look(root, "", True)
            if len(self._added_to) == known:
                break
        else:
            self._all_local = False

    def is_closed(self, path: str) -> bool:
        """Return whether no other schema describes the same object."""
        return self._all_local and path in self._closed

    def resolved(self, schema: Any) -> Any:
        return self._followed(schema, "")[0]

    def _look(self, schema: Any, path: str, alone: bool) -> None:
        if not isinstance(schema, dict):
            return
        alone = alone and path not in self._added_to
        applied = [key for key in ("$ref", *_IN_PLACE) if key in schema]
        if alone and not applied:
            self._closed.add(path)
        inner = alone and len(applied) == 1 and not _OF_OBJECTS & set(schema)
        inner = inner and (applied != ["allOf"] or len(listed(schema["allOf"])) == 1)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            self._all_local = self._all_local and ref.startswith("#") and ref[1:2] in ("", "/")
            if not inner:
                self._added_to.add(unquote(ref[1:]))
        if isinstance(schema.get("oneOf"), list):
            self._note_exclusive(schema["oneOf"], path)
        for place, child in children(schema):
            free = place[0] not in ("dependentSchemas", "dependencies", "not")
            if place[0] in _IN_PLACE:
                free = inner
            self._look(child, pointer(path, *place), free)

    def _note_exclusive(self, branches: list[Any], path: str) -> None:
        found = [self._followed(branch, pointer(path, "oneOf", i)) for i, branch in enumerate(branches)]
        if not all(isinstance(schema, dict) for schema, _ in found):
            return
        objects = [(schema, place) for schema, place in found if _types(schema) == {"object"}]
        others = [_types(schema) for schema, _ in found if _types(schema) != {"object"}]
        if objects:
            others.append({"object"})
        if not _are_disjoint(others):
            return
        if len(objects) < 2 or self._tagged(objects):
            self.exclusive.add(path)

    def _tagged(self, objects: list[tuple[dict[str, Any], str]]) -> bool:
        """Return whether a property has other values in each object. All objects are then `forced` to have it."""
        declared = [schema.get("properties") for schema, _ in objects]
        names = [one for one in declared if isinstance(one, dict)]
        if len(names) < len(declared):
            return False
        for name in names[0]:
            if all(name in one for one in names) and _are_disjoint([self._values(one[name]) for one in names]):
                for schema, place in objects:
                    if name not in [*listed(schema.get("required")), *self.forced.get(place, [])]:
                        self.forced.setdefault(place, []).append(name)
                return True
        return False

    def _values(self, schema: Any) -> set[str] | None:
        """Return the values that a schema lists, as JSON; None if it lists none, or numbers, lists or objects."""
        values = values_of(self.resolved(schema))
        if not isinstance(values, list) or any(isinstance(value, int | float | list | dict) for value in values):
            return None
        return {json.dumps(value) for value in values}

    def _followed(self, schema: Any, path: str) -> tuple[Any, str]:
        """Return the target of a schema that says nothing but a reference, and its path, or the schema itself."""
        for _ in range(MAX_PASSES):
            if not isinstance(schema, dict):
                break
            if len(listed(schema.get("allOf"))) == 1 and not _OF_OBJECTS & set(schema):
                schema, path = schema["allOf"][0], pointer(path, "allOf", 0)
            elif isinstance(schema.get("$ref"), str) and not _OF_OBJECTS & set(schema):
                path = unquote(schema["$ref"][1:])
                schema = self._target(path)
            else:
                break
        return schema, path

    def _target(self, path: str) -> Any:
        found = self._root
        for name in path.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and re.fullmatch(r"\d{1,6}", name) and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def values_of(schema: Any) -> Any:
    """Return the values that `enum` or `const` of a schema allows; None without these keywords."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return schema.get("enum", [schema["const"]])
    return schema.get("enum")


def _types(schema: dict[str, Any]) -> set[str] | None:
    """Return the types that a schema allows; None if it allows all."""
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    names = set(listed(given))
    if "number" in names:
        names = names - {"number"} | {"integer", "fraction"}
    return names or None


def _are_disjoint(sets: list[set[str] | None]) -> bool:
    known = [one for one in sets if one is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(set().union(*known))

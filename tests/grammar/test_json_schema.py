"""JSON schemas under a grammar, against `jsonschema`: what comes out validates, and what validates comes through."""

from __future__ import annotations

import datetime
import enum
import json
import os
import random
import re
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from forkpoint.errors import InvalidParamsError
from tests.engine.tokenizers import byte_level
from tests.grammar.random_schemas import RandomSchemas
from tests.grammar.test_grammar import Setup
from tests.grammar.test_grammar import takes as grammar_takes

SETUP = Setup(byte_level())
NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "100"))  # of each random test
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
BOOL: dict[str, Any] = {"type": "boolean"}
CLOSED = {"type": "object", "additionalProperties": False}


def walk(schema: Any, seed: int, *, compact: bool = False, limit: int = 400) -> str | None:
    """A text of random tokens that the grammar allows; None if it is not whole by the limit."""
    grammar = SETUP.start(json=json.dumps(schema), disable_any_whitespace=compact)
    rng, ids = random.Random(seed), list[int]()
    for _ in range(limit):
        allowed = SETUP.allowed(grammar) if grammar.mask is not None else []
        if not allowed or (SETUP.eos in allowed and rng.random() < 0.3):
            return SETUP.text(ids)
        allowed = [token for token in allowed if token != SETUP.eos]
        told = [token for token in allowed if SETUP.text([token]).strip() or rng.random() < 0.05] or allowed
        ends = [token for token in told if SETUP.text([token])[:1] in '"]}']
        ids.append(rng.choice(ends if ends and rng.random() < 0.3 else told))
        grammar.accept(ids[-1])
        if grammar.mask is None:
            return SETUP.text(ids)
    return None


def takes(schema: Any, text: str, **options: Any) -> bool:
    return grammar_takes(SETUP, text, json=json.dumps(schema), **options)


def check(schema: Any, seeds: range) -> int:
    """How many walks came to an end; all of them validate."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    found = 0
    for seed in seeds:
        text = walk(schema, seed, compact=seed % 2 == 0)
        if text is not None:
            validator.validate(json.loads(text))
            found += 1
    return found


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


ENFORCED: dict[str, Any] = {
    "pattern and length": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "pattern and long length": {"type": "string", "pattern": "^[a-z0-9_-]+$", "maxLength": 5000, "minLength": 2},
    "pattern inside": {"type": "string", "pattern": "ab", "maxLength": 6},
    "format and length": {"type": "string", "format": "ipv4", "maxLength": 9},
    "required elsewhere": {
        "properties": {"a": BOOL},
        "required": ["b"],
        "additionalProperties": BOOL,
        "type": "object",
    },
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "oneOf of tags": {"oneOf": [{**CLOSED, "properties": {"t": {"const": c}}, "required": ["t"]} for c in "ab"]},
    "oneOf of optional tags": {"oneOf": [{**CLOSED, "properties": {"t": {"const": c}, c: BOOL}} for c in "ab"]},
    "anyOf beside type": {"type": "integer", "anyOf": [{"minimum": 3, "maximum": 4}, {"const": 9}]},
    "allOf of several": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
    "allOf beside properties": {
        "type": "object",
        "properties": {"a": BOOL},
        "required": ["a"],
        "allOf": [{"properties": {"b": BOOL}, "required": ["b"]}],
    },
    "$ref beside bounds": {"$defs": {"n": {"type": "integer"}}, **ref("n"), "minimum": 3, "maximum": 5},
    "$ref escaped": {"$defs": {"a/b~c%": BOOL}, "$ref": "#/$defs/a~1b~0c%25"},
    "$ref with $id": {"$id": "http://e.x/s", "$defs": {"n": BOOL}, "$ref": "http://e.x/s#/$defs/n"},
    "$ref to itself": {**CLOSED, "properties": {"n": {"type": ["null"]}, "c": {"$ref": "#"}}, "required": ["n"]},
    "const against type": {"type": ["string", "null"], "enum": ["a", 1, None]},
    "names with quotes": {**CLOSED, "properties": {'a"b': BOOL, "c\nd\\": BOOL}, "required": ['a"b', "c\nd\\"]},
    "texts with quotes": {"enum": ['"a', 'b"1', "\nc", "\x7f0", "😀", "\\u0041"]},
    "dependencies": {**CLOSED, "properties": {"a": BOOL, "b": BOOL}, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"properties": {"a": BOOL}, "type": "object", "dependentSchemas": {"a": {"required": ["z"]}}},
    "propertyNames": {"propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": BOOL, "type": "object"},
    "patternProperties": {
        "patternProperties": {"^x": BOOL},
        "additionalProperties": {"type": "null"},
        "type": "object",
    },
    "a name and others": {"properties": {"a": {"const": 1}}, "additionalProperties": BOOL, "type": "object"},
    "maxProperties": {"type": "object", "additionalProperties": BOOL, "maxProperties": 2, "minProperties": 1},
    "unevaluated": {"unevaluatedProperties": False, "properties": {"a": BOOL}, "type": "object"},
    "$ref to an anchor": {"$defs": {"n": {"$anchor": "foo", **BOOL}}, "$ref": "#foo"},
    "names of an enum": {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": BOOL, "type": "object"},
    "few names of an enum": {"propertyNames": {"enum": ["a.", "b c"]}, "type": "object", "maxProperties": 1},
    "names of a length": {"propertyNames": {"maxLength": 2}, "additionalProperties": BOOL, "type": "object"},
    "multipleOf in decimals": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    "classes of ECMA-262": {"type": "string", "pattern": "^[[a&&b]{2,4}$"},
    "oneOf of references": {
        "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}},
        "oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}],
    },
    "a property that may not come": {"properties": {"a": False, "b": BOOL}, "required": ["b"], "type": "object"},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": -30},
    "multipleOf of a number": {"type": "number", "multipleOf": 1},
    "bounds of an integer": {"type": "integer", "minimum": 1.5, "maximum": 3.5},
    "bounds of a number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "annotations": {"title": "t", "x-y": 1, "deprecated": True, "nullable": True, "$comment": "c", "type": "null"},
    "anything": {},
}


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_taken_is_enforced(name: str) -> None:
    assert check(ENFORCED[name], range(6)) > 2


REFUSED: list[tuple[str, Any]] = [
    ("oneOf", {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 15}]}),
    ("$ref", {"$ref": "http://x.y/z"}),
    ("$ref", {"properties": {"a": {"$ref": "#/$defs/none"}}}),
    ("$dynamicRef", {"$dynamicAnchor": "n", "properties": {"c": {"$dynamicRef": "#n"}}}),
    ("if", {"if": {"const": 1}, "then": {"const": 1}}),
    ("not", {"properties": {"a": {"not": {"minimum": 3}}}}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("minProperties", {**CLOSED, "properties": dict.fromkeys("abcd", BOOL), "minProperties": 2}),
    ("maxProperties", {**CLOSED, "properties": dict.fromkeys("abcd", BOOL), "maxProperties": 2}),
    ("patternProperties", {"type": "object", "patternProperties": {"^x": BOOL, "y$": {"type": "null"}}}),
    ("propertyNames", {"properties": {"a": BOOL}, "propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"unevaluatedProperties": False, "allOf": [{"properties": {"a": BOOL}}]}),
    ("pattern", {"type": "string", "pattern": "^(?!a)b$"}),
    ("pattern", {"type": "string", "pattern": r"\bfoo"}),
    ("pattern", {"type": "string", "pattern": "("}),
    ("pattern", {"type": "string", "pattern": "^[a--b]$"}),
    ("format", {"type": "string", "format": "regex"}),
    ("contentEncoding", {"type": "string", "contentEncoding": "quoted-printable"}),
    ("minimum", {"type": "integer", "minimum": 10**20}),
    ("enum", {"enum": [2**60 + 1]}),
    ("minimum", {"x-guidance": {"lenient": True}, "properties": {"a": {"minimum": "1"}}}),
    *((next(iter(schema)), schema) for schema in ({"allOf": 3}, {"type": "strin"}, {"properties": []}, {"enum": 1})),
]


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(keyword: str, schema: Any) -> None:
    with pytest.raises(InvalidParamsError, match=rf"uses '{re.escape(keyword)}' at /"):
        SETUP.start(json=schema)


def test_a_relaxed_schema_lacks_what_is_refused_and_nothing_else() -> None:
    num_relaxed = 0
    for keyword, schema in REFUSED:
        outer = {"type": "object", "properties": {"a/b": schema, "c": {"enum": ["x"]}}, "required": ["c"]}
        found, said = SETUP.compiler.relaxed(outer)
        assert {**found, "properties": {**found["properties"], "a/b": schema}} == outer
        if keyword == "oneOf":
            assert found["properties"]["a/b"] == {"anyOf": schema["oneOf"]}
        if said:
            assert len(said) == 1 and f"uses {keyword!r} at /properties/a~1b" in said[0]
            SETUP.start(json=found)
            num_relaxed += 1
        else:
            assert found == outer
    assert num_relaxed > 12
    assert SETUP.compiler.relaxed({"items": [{"not": {}, "if": {}, "then": {}}]})[0] == {"items": [{"then": {}}]}
    tagged = {"oneOf": [{"type": "null"}, {"oneOf": [{"const": 1}, {"type": "string"}]}, {"type": "object"}]}
    inner = {"anyOf": tagged["oneOf"][1]["oneOf"]}  # type: ignore[index]
    assert SETUP.compiler.relaxed(tagged)[0] == {"anyOf": [{"type": "null"}, inner, {"type": "object"}]}
    assert SETUP.compiler.relaxed({"oneOf": [{"type": "null"}, {"const": "a", "type": "string"}]})[1] == []


@pytest.mark.parametrize(
    ("schema", "taken", "num_said"),
    [
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "2", 1),
        ({"oneOf": [{"enum": ["a"]}, {"const": "b"}]}, '"b"', 0),
        ({"anyOf": [{"const": 1}, {"const": 2}], "oneOf": [{"maximum": 2}, {"minimum": 2}]}, "2", 1),
        ({"patternProperties": {"^(?=a)": {}}, "additionalProperties": False, "required": ["ab"]}, '{"ab": 1}', 1),
    ],
)
def test_a_relaxed_schema_can_be_matched(schema: Any, taken: str, num_said: int) -> None:
    found, said = SETUP.compiler.relaxed(schema)
    assert len(said) == num_said and takes(found, taken)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "const": 1},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {**CLOSED, "required": ["b"]},
        {"enum": []},
        False,
    ],
)
def test_a_schema_that_nothing_matches_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParamsError, match="matches nothing"):
        SETUP.start(json=json.dumps(schema))


def test_a_schema_nested_too_deep_is_refused_before_it_is_read() -> None:
    for text in ("[" * 100_000, '{"items":' * 65 + "{}" + "}" * 65, '{"a":' * 5000):
        with pytest.raises(InvalidParamsError, match="nested too deep"):
            SETUP.start(json=text)
    SETUP.start(json='{"items":' * 63 + '{"type": "null"}' + "}" * 63)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "b\"l'ue"


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: float = Field(gt=0)


class Box(BaseModel):
    kind: Literal["box"]
    label: str = Field("x", pattern=r"^[a-z_]+$", min_length=1, max_length=64)


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Order(BaseModel):
    """What pydantic makes of most that people use."""

    id: uuid.UUID
    at: datetime.datetime
    day: datetime.date
    colour: Colour = Field(description="of the frame", examples=["red"])
    shape: Annotated[Circle | Box, Field(discriminator="kind")]
    shapes: list[Circle | Box]
    counts: dict[str, int]
    pair: tuple[int, str]
    few: list[int] = Field(min_length=1, max_length=4)
    age: int | None = Field(None, ge=0, le=120)
    tree: Tree
    anything: Any = None


ORDER: dict[str, Any] = {
    "id": "0b5ed0ba-1c53-4a7c-9d2e-8a8d1a4f3c11",
    "at": "2024-01-02T03:04:05Z",
    "day": "2024-02-03",
    "colour": "b\"l'ue",
    "shape": {"kind": "circle", "radius": 0.25},
    "shapes": [{"kind": "box", "label": "a_b"}, {"kind": "circle", "radius": 3}],
    "counts": {"k": 1, "é": -2},
    "pair": [1, "b"],
    "few": [1, 2],
    "age": None,
    "tree": {"value": 1, "children": [{"value": 2, "children": []}]},
    "anything": {"x": [1, None, {"y": 1.5e-7}]},
}


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_models_of_pydantic_are_taken_however_they_are_printed(indent: int | str | None) -> None:
    schema = Order.model_json_schema()
    assert takes(schema, json.dumps(ORDER, indent=indent, ensure_ascii=False))
    assert takes(schema, json.dumps(ORDER, separators=(",", ":"), ensure_ascii=False))
    assert takes(schema, json.dumps(ORDER, ensure_ascii=False), disable_any_whitespace=True)
    assert not takes(schema, json.dumps({**ORDER, "age": 121}, ensure_ascii=False))
    assert not takes(schema, json.dumps({**ORDER, "shape": {"kind": "box", "label": "A"}}, ensure_ascii=False))


def test_walks_through_a_model_of_pydantic_are_its_instances() -> None:
    texts = [walk(Order.model_json_schema(), seed, limit=900) for seed in range(8)]
    found = [Order.model_validate_json(text) for text in texts if text is not None]
    assert found


@settings(max_examples=NUM_SCHEMAS, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**40))
def test_random_schemas_are_enforced_or_refused(seed: int) -> None:
    schema = RandomSchemas(random.Random(seed)).root()
    try:
        check(schema, range(3))
    except InvalidParamsError as error:
        told = re.search(r"uses '([$\w]+)' at /", str(error))
        assert told is None or f'"{told[1]}"' in json.dumps(schema)
        assert told or "matches nothing" in str(error) or "only the empty text" in str(error)


WIDE: list[Any] = [
    {"type": "integer", "minimum": -20, "exclusiveMaximum": 300},
    {"type": "integer", "multipleOf": 6},
    {"type": "number", "minimum": -2.5, "maximum": 100},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]+x?"},
    {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [BOOL, {"const": 1}], "items": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]*$"}, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^x": BOOL, "^y$": {"enum": [True, None]}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": BOOL}, "required": ["a", "b"], "additionalProperties": {"type": "null"}},
    {**CLOSED, "properties": dict.fromkeys("abc", BOOL), "dependentRequired": {"a": ["c"]}},
    {"anyOf": [{"type": "null"}, {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 50}]}]},
    {"oneOf": [{**CLOSED, "properties": {"t": {"const": c}, "v": BOOL}, "required": ["t"]} for c in "abc"]},
    {"enum": [1, "a", None, [1, {"b": []}], 2.5]},
    {},
]


NUMBERS = st.integers(-30, 320) | st.integers(-40, 1300).map(lambda number: (number + 0.5) / 10)
SCALARS = st.sampled_from([None, True, False, 1, 2, "a", "ab", "aax", "é"]) | NUMBERS | st.text("abcxy ", max_size=6)
NAMED = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "x1", "xy", "ay", "t", "v"]), SCALARS, max_size=4)
INSTANCES = SCALARS | st.lists(SCALARS | st.integers(1, 3), max_size=5) | NAMED | st.lists(NAMED, max_size=2)


@pytest.mark.parametrize("schema", WIDE, ids=json.dumps)
def test_what_validates_is_taken_and_nothing_else(schema: Any) -> None:
    """In the schema's order of names, integers without a point: in these respects alone grammars are stricter."""
    kinds = {"array": st.lists(SCALARS | st.integers(1, 3), max_size=5), "object": NAMED}
    likely = kinds.get(schema.get("type", ""), INSTANCES)
    valid = jsonschema.Draft202012Validator(schema)

    @settings(max_examples=max(20, NUM_SCHEMAS // 5), deadline=None, suppress_health_check=list(HealthCheck))
    @given(likely | INSTANCES)
    def check_instances(value: Any) -> None:
        if isinstance(value, dict):
            first = [*schema.get("properties", schema.get("oneOf", [{}])[0].get("properties", {}))]
            first += schema.get("required", [])
            value = {name: value[name] for name in dict.fromkeys([*first, *value]) if name in value}
        assert takes(schema, json.dumps(value, ensure_ascii=False)) == valid.is_valid(value)

    check_instances()

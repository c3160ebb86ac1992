"""Values that nobody checked: extremes, wrong types, deep and long structures, odd texts."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

NUMBERS: Final = (
    *(-1, 0, 1, 2, 7, 127, 128, 129, 1535, 1536),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**20, 10**400),
    *(-(2**31), -(2**31) - 1, -(2**63), -(2**64)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 5e-324, 1e6, 1e15, 1e308, -1e308),
)
LITERALS: Final = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "0x10", "'a'", "", "[1,]", "{]", '"\ud800"')
TEXTS: Final = (
    *("", " ", "\0", "a", "false", "true", "null", "0", "-1", "1e400", "\x1b[31m\n", "\u202e", "\ud800", "x" * 70_000),
    *(
        "\N{FAMILY}\u200d\N{GIRL}",
        "e\u0301" * 40,
        "<think>",
        "</think>",
        "<tool_call>",
        "{{ 7 * 7 }}",
        "{% for x in",
        "../../etc",
    ),
)
REGEXES: Final = (
    "a+",
    "(a+)+b",
    "a{100000}",
    "(a{1000}){1000}",
    "(",
    "[z-a]",
    "(?=a)b",
    "\\",
    "(a|b|)*c",
    "^$",
    ".*",
    "\\p{L}",
)
GRAMMARS: Final = (
    'root ::= "a" | "b"',
    "root ::= root",
    "root ::= foo",
    "",
    'root ::= "',
    "root ::= [^]",
    "x ::= x x | x",
)
KEYWORDS: Final = (
    *(
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "anyOf",
        "oneOf",
    ),
    *("allOf", "not", "$ref", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "multipleOf"),
    *("minItems", "maxItems", "contains", "patternProperties", "propertyNames", "if", "$defs", "dependencies"),
)
KINDS: Final = ("integer", "number", "string", "boolean", "null", "array", "object", "thing")
MAX_DEPTH: Final = 3


class Raw(str):
    """Text that is put into the body unchanged, JSON or not."""


def wild(random: Random) -> Any:
    """Return any JSON value, or a text that is not JSON."""
    match random.randrange(12):
        case 0 | 1 | 2:
            return random.choice(NUMBERS)
        case 3 | 4:
            return random.choice(TEXTS)
        case 5:
            return random.choice((True, False, None))
        case 6:
            return Raw(random.choice(LITERALS))
        case 7:
            return [wild_leaf(random) for _ in range(random.choice((0, 1, 3, 200)))]
        case 8:
            return {str(wild_leaf(random)): wild_leaf(random) for _ in range(random.choice((0, 1, 3, 50)))}
        case 9:
            return nested(random.choice((2, 70, 900, 3000)), random.choice(("[", '{"a":')))
        case 10:
            return [random.choice((1, -1, "a", None, [], 2**40))] * random.choice((2, 1000, 20_000))
        case _:
            return wild_schema(random)


def wild_leaf(random: Random) -> Any:
    return random.choice((random.choice(NUMBERS), random.choice(TEXTS), None, True, [], {}))


def nested(depth: int, opening: str) -> Raw:
    closing = "]" if opening == "[" else "}"
    return Raw(opening * depth + "1" + closing * depth)


def wild_schema(random: Random, depth: int = 0) -> Any:
    """Return something that looks like a JSON schema and need not be one."""
    if depth > MAX_DEPTH or random.random() < 0.1:
        return random.choice((True, False, {}, {"type": random.choice(KINDS)}, wild_leaf(random)))
    schema: dict[str, Any] = {"type": random.choice(KINDS)} if random.random() < 0.7 else {}
    for keyword in random.sample(KEYWORDS, random.randrange(1, 4)):
        schema[keyword] = _argument(random, keyword, depth)
    return schema


def _argument(random: Random, keyword: str, depth: int) -> Any:
    if random.random() < 0.15:
        return wild_leaf(random)
    match keyword:
        case "properties" | "patternProperties" | "$defs" | "dependencies":
            return {random.choice(("a", "b", '"', "\n1", "")): wild_schema(random, depth + 1) for _ in range(2)}
        case "anyOf" | "oneOf" | "allOf" | "prefixItems":
            return [wild_schema(random, depth + 1) for _ in range(random.randrange(3))]
        case "required" | "enum":
            return [wild_leaf(random) for _ in range(random.randrange(4))]
        case "pattern":
            return random.choice(REGEXES)
        case "$ref":
            return random.choice(("#", "#/$defs/a", "#/properties/a", "#/none", "http://x.test/y", "#a", "#/$defs/~1"))
        case "format":
            return random.choice(("email", "date", "uuid", "ipv4", "foo"))
        case "type":
            return random.choice((random.choice(KINDS), [random.choice(KINDS), "null"]))
        case "const":
            return wild_leaf(random)
        case "items" | "additionalProperties" | "not" | "contains" | "propertyNames" | "if":
            return wild_schema(random, depth + 1)
        case _:
            return random.choice(NUMBERS)


def structured(random: Random) -> dict[str, Any]:
    """Return a value of `structured_outputs`."""
    one = {
        "json": lambda: wild_schema(random),
        "regex": lambda: random.choice(REGEXES),
        "choice": lambda: [random.choice(('"a"', "\\", "\x00b", "yes", "", "\N{GRINNING FACE}", 5)) for _ in range(3)],
        "grammar": lambda: random.choice(GRAMMARS),
        "json_object": lambda: random.choice((True, False, "true")),
        "structural_tag": lambda: wild(random),
    }
    names = random.sample(sorted(one), 1 if random.random() < 0.9 else 2)
    return {name: one[name]() for name in names}


def dumps(value: Any) -> bytes:
    """Return JSON text with the `Raw` parts unchanged. Elsewhere lone surrogates are written as escapes."""
    raws: list[str] = []

    def keep(part: Any) -> Any:
        if isinstance(part, Raw):
            raws.append(str(part))
            return f"\u0001{len(raws) - 1}\u0001"
        if isinstance(part, dict):
            return {key: keep(one) for key, one in part.items()}
        return [keep(one) for one in part] if isinstance(part, list) else part

    text = json.dumps(keep(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"\\u0001{number}\\u0001"', raw)
    return text.encode("utf-8", "surrogatepass")

"""Wrong values of request bodies: the error that says which value is wrong, and what is allowed instead."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from forkpoint.checks import shown
from forkpoint.server.errors import HTTPError

# In the location of an error, pydantic puts the alternatives of a union between field names; these are their names.
KIND: Final = re.compile(r"str|int|[A-Z]\w*|.*\[.*")
MISSING: Final = "missing"
# What is allowed, by the type of pydantic's error. Names in braces are in the error's context.
ALLOWED: Final = MappingProxyType(
    {
        "bool_type": "true or false",
        "dict_type": "an object",
        "float_type": "a number",
        "greater_than": "a number above {gt}",
        "greater_than_equal": "a number of at least {ge}",
        "int_parsing": "an integer",
        "int_type": "an integer",
        "less_than": "a number below {lt}",
        "less_than_equal": "a number of at most {le}",
        "list_type": "a list",
        "literal_error": "{expected}",
        "model_type": "an object",
        "string_pattern_mismatch": "a string that matches {pattern}",
        "string_too_long": "a string with a length of at most {max_length}",
        "string_too_short": "a string with a length of at least {min_length}",
        "string_type": "a string",
        "too_long": "a list with a length of at most {max_length}",
        "too_short": "a list with a length of at least {min_length}",
        "value_error": "{error}",
    }
)


def wrong_value(errors: Sequence[Mapping[str, Any]]) -> HTTPError:
    """Return an error that names one of the mistakes that pydantic found."""
    error = _nearest(errors)
    place = _place(error)
    if error["type"] == MISSING:
        return HTTPError(400, f"{place} is missing; give it", param=place)
    given = shown(error["input"])
    subject = f"{place}={given}" if place else f"the body {given}"
    kinds = dict.fromkeys(_allowed(each) for each in errors if _place(each) == place and each["type"] != MISSING)
    return HTTPError(400, f"{subject} is not allowed; give {', or '.join(kinds)}", param=place or None)


def _place(error: Mapping[str, Any]) -> str:
    """Return the path of the wrong value, such as `messages.0.role`; "" for the body itself."""
    return ".".join(str(part) for part in error["loc"] if isinstance(part, int) or not KIND.fullmatch(part))


def _allowed(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    numbers = {name: f"{value:g}" for name, value in context.items() if isinstance(value, float)}
    return ALLOWED[error["type"]].format_map({**context, **numbers})


def _nearest(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return an error of the first wrong field; if it may be of several kinds, of the kind nearest to it."""
    by_kind: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for error in errors:
        if error["loc"][:1] == errors[0]["loc"][:1]:
            by_kind[_alternative(error)].append(error)
    return min(by_kind.values(), key=lambda found: (len(found), -len(found[0]["loc"]), -_num_right(found[0])))[0]


def _alternative(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the path to the first alternative of a union that the error lies in; without one, to a list's element."""
    path = error["loc"]
    kinds = (number for number, part in enumerate(path) if isinstance(part, str) and KIND.fullmatch(part))
    return tuple(path[: next(kinds, 1) + 1])


def _num_right(error: Mapping[str, Any]) -> int:
    """Return the number of list elements before the wrong one; 0 outside lists."""
    return next((part for part in error["loc"][1:] if isinstance(part, int)), 0)

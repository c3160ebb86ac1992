"""Checks of values that callers give: each becomes a plain Python value, or an error says what is allowed."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from ipaddress import IPv6Address, ip_address
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from forkpoint.errors import ForkpointError, ModelFolderError
from forkpoint.foreign_files import foreign_files

MAX_SHOWN = 100  # characters of a given value that an error shows
MAX_INTEGER: Final = 2**63 - 1
MAX_POSITIONS: Final = 2**31 - 1  # positions are int32 on the device
MAX_JSON_BYTES: Final = 2**28  # limit of a file of a model folder; the largest index has some megabytes
TEXT_OBJECTS: Final = ("text_config", "llm_config")  # objects of config.json with the fields of a text model
OUTER: Final = (*TEXT_OBJECTS, "architectures", "model_type")  # fields that an override changes outside of them alone
MAX_CHARS: Final = 2**20  # limit of a text without bounds, such as a chat template


class Bounds(NamedTuple):
    """The range of a number: `[low, high]`, or `(low, high]` with `above`. For a text, it counts characters."""

    low: float
    high: float
    above: bool = False

    def includes(self, number: float) -> bool:
        return self.low <= number <= self.high and not (self.above and number == self.low)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}, at most {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Checker:
    """Returns checked values, or raises `error` for a wrong type or range. `kind` precedes names in messages.

    numpy's numbers and booleans count as Python's. A boolean is not a number, and a text is not a list.
    """

    error: type[ForkpointError]
    kind: str = ""

    def refuse(self, name: str, given: object, allowed: str) -> NoReturn:
        raise self.error(f"{self.kind}{name}={shown(given)} is not allowed; give {allowed}")

    def require(self, ok: bool, name: str, given: object, allowed: str) -> None:
        if not ok:
            self.refuse(name, given, allowed)

    def integer(self, name: str, value: object, low: int, high: int, allowed: str = "") -> int:
        """Return an integer in `[low, high]`. `allowed` describes it in the error in place of the bounds."""
        # Check bool first, because it is an integer in Python. numpy's bool is not.
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            self.refuse(name, value, allowed or f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, value: object, bounds: Bounds) -> float:
        """Return a finite number within `bounds`, as a float, or refuse it."""
        found = _as_float(value)
        if found is None or not bounds.includes(found):
            self.refuse(name, value, f"a number {bounds}")
        return found

    def flag(self, name: str, value: object, allowed: str = "True or False") -> bool:
        if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
            self.refuse(name, value, allowed)
        return bool(value)

    def text(self, name: str, value: object, most: int, *, empty: bool = True) -> str:
        """Return a text of at most `most` characters without lone surrogates."""
        if not is_text(value) or len(value) > most or not (value or empty):  # type: ignore[arg-type]
            kind = "a string" if empty else "a non-empty string"
            self.refuse(name, value, f"{kind} of valid Unicode, at most {most} characters")
        return str(value)

    def items(self, name: str, value: object, most: int, allowed: str = "") -> tuple[object, ...]:
        """Return at most `most` members of a list, tuple, set, array or similar. None has no members."""
        if value is None:
            return ()
        allowed = allowed or f"a list of at most {most}"
        if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray | Mapping):
            self.refuse(name, value, allowed)
        try:
            if len(value) > most:
                raise self.error(f"{self.kind}{name} with {len(value)} members is not allowed; give {allowed}")
            return tuple(value)
        except TypeError:  # a zero-dimensional array
            self.refuse(name, value, allowed)

    def integers(self, name: str, value: object, most: int, low: int, high: int) -> tuple[int, ...]:
        """Return at most `most` integers in `[low, high]`."""
        allowed = f"a list of at most {most} integers from {low} to {high}"
        return tuple(self.integer(name, item, low, high, allowed) for item in self.items(name, value, most))


def option(default: Any = MISSING, help: str | None = None, bounds: Bounds | None = None, **extra: Any) -> Any:
    """Declare a dataclass field for `checked_fields`, with its bounds.

    With `help` it is also a command-line flag. `allowed` describes the allowed integers if the bounds do not suffice.
    """
    return field(default=default, metadata={"help": help, "bounds": bounds, **extra})


def checked_fields(given: object, check: Checker, none: str = "") -> dict[str, Any]:
    """Return the flag, number and text fields of a dataclass as plain values, checked against their types and bounds.

    `none` describes None in errors of integer fields that may also be None.
    """
    found: dict[str, Any] = {}
    for item, kind, is_optional in _plain_fields(type(given)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(given, item.name)
        if value is None and is_optional:
            found[item.name] = None
        else:
            found[item.name] = _checked(item, kind, value, check, none if is_optional else "")
    return found


@cache
def _plain_fields(owner: type[Any]) -> tuple[tuple[Field[Any], Any, bool], ...]:
    """Return each flag, number or text field with its type and whether it may be None."""
    found, hints = [], get_type_hints(owner)
    for item in fields(owner):
        hint = hints[item.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        kind, *others = (kind for kind in kinds if kind is not types.NoneType)
        if not others and (kind in (bool, int, float, str) or get_origin(kind) is Literal):
            found.append((item, kind, len(kinds) > 1))
    return tuple(found)


def _checked(item: Field[Any], kind: Any, value: Any, check: Checker, none: str) -> Any:
    name, bounds = item.name, item.metadata.get("bounds")
    if kind is bool:
        return check.flag(name, value)
    if kind is int:
        low, high, expected = -MAX_INTEGER - 1, MAX_INTEGER, "an integer of at most 64 bits"
        if bounds:
            low, high = int(bounds.low), int(bounds.high)
            expected = f"an integer from {low} to {high}"
        return check.integer(name, value, low, high, item.metadata.get("allowed") or none + expected)
    if kind is float:
        return check.number(name, value, bounds or Bounds(-1e300, 1e300))
    if kind is str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        return check.text(name, value, int((bounds or Bounds(0, MAX_CHARS)).high))
    texts = get_args(kind)
    ok = isinstance(value, str) and value in texts
    check.require(ok, name, value, f"one of {', '.join(map(repr, texts))}")
    return value


def shown(value: object) -> str:
    """Return a given value as errors show it; long values are truncated."""
    try:
        text = repr(_beginning(value))
    except Exception:  # integers of thousands of digits, and objects whose repr fails
        return f"<{type(value).__name__}>"
    if len(text) > MAX_SHOWN:
        return text[:MAX_SHOWN] + "..."
    return text


def _beginning(value: object) -> object:
    """Return the part of a value that fills `MAX_SHOWN` characters. Formatting the whole value can take seconds."""
    match value:
        case str() | bytes():
            return value[: MAX_SHOWN + 1]
        case list():
            return [_beginning(inner) for inner in value[:MAX_SHOWN]]
        case dict():
            return {_beginning(name): _beginning(inner) for name, inner in islice(value.items(), MAX_SHOWN)}
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a model's config.json, with `overrides` applied as vLLM's --hf-overrides are.

    An override of an object whose name ends in "_config" is merged into it, also further inside. Any other override
    replaces the field, and in a multimodal folder the text model's too: otherwise the text model's own value would
    hide it. Raises ModelFolderError.
    """
    values, given = read_json(folder / "config.json"), dict(overrides or {})
    usual, other = TEXT_OBJECTS
    if usual not in values and isinstance(values.get(other), dict) and isinstance(given.get(usual), Mapping):
        merged, own = given.pop(usual), given.get(other, {})  # vLLM calls it by the usual name
        given[other] = {**merged, **own} if isinstance(own, Mapping) else own
    for name in TEXT_OBJECTS:
        inner, own = values.get(name), given.get(name, {})
        if isinstance(inner, dict) and isinstance(own, Mapping):
            own = {k: v for k, v in given.items() if (k in inner or k not in values) and k not in OUTER} | dict(own)
            given |= {name: own} if own else {}
    return _overridden(values, given, is_outer=True)


def _overridden(values: Mapping[str, Any], overrides: Mapping[str, Any], is_outer: bool) -> dict[str, Any]:
    found = dict(values)
    for name, value in overrides.items():
        old = found.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and (name.endswith("_config") or not is_outer):
            value = _overridden(old, value, is_outer=False)
        found[name] = value
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder.

    Raises ModelFolderError if the file is missing, is not a regular one, is too large, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelFolderError(f"{path} is not a regular file; give a Hugging Face model folder")
        if (num_bytes := path.stat().st_size) > MAX_JSON_BYTES:
            raise ModelFolderError(f"{path} has {num_bytes} bytes; at most {MAX_JSON_BYTES} are read")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = foreign_files(path.parent)
        raise ModelFolderError(f"{path} does not exist{found}; give a Hugging Face model folder") from None
    except RecursionError:
        raise ModelFolderError(f"{path} cannot be read as JSON: its objects are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{path} holds {type(values).__name__}, not a JSON object")
    return values


def json_value(text: str | bytes, default: object = None) -> Any:
    """Return what a JSON text says; `default` for a text that is not JSON, or is nested too deeply.

    U+FFFD replaces a lone half of a surrogate pair, which JSON can escape, but which no UTF-8 text can hold.
    """
    try:
        value = json.loads(text)
        escapes = ("\\ud", "\\uD") if isinstance(text, str) else (b"\\ud", b"\\uD")
        if any(escape in text for escape in escapes):  # type: ignore[operator]
            written = json.dumps(value, ensure_ascii=False)
            value = json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return value
    except (ValueError, RecursionError):
        return default


def member(value: object, name: str) -> Any:
    """Return a member of a JSON value; None if the value is not an object or lacks it."""
    if not isinstance(value, Mapping):
        return None
    return value.get(name)


def listed(value: object) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    if not isinstance(value, list):
        return []
    return value


def one_or_more(value: object) -> list[Any]:
    """Return a list or tuple as a list, and any other value as a list of one."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def plain_members(value: Any) -> Any:
    """Return the members of an array or a tensor in lists, as Python values; any other value as it is."""
    try:
        return value.tolist()
    except Exception:  # other values, and tensors without members
        return value


def is_text(value: object) -> bool:
    """Return whether `value` is a string without lone surrogates, which cannot be encoded."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_ipv6(text: str) -> bool:
    """Return whether `text` is an IPv6 address, without brackets."""
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address can only mean this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_in_url(host: str) -> str:
    """Return a host as URLs contain it: an IPv6 address is in brackets."""
    if ":" in host:
        return f"[{host}]"
    return host


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except (OverflowError, ValueError):
        return None
    if not math.isfinite(found):
        return None
    return found

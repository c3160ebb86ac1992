"""Other spellings of flags: underscores, vLLM's other names, and fields of JSON flags (`--flag.field value`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from forkpoint.checks import json_value
from forkpoint.errors import ConfigError

# Flags of vLLM that are called otherwise here.
OTHER_NAMES: Final = {
    "--dcp-kv-cache-interleave-size": "--cp-kv-cache-interleave-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--shutdown-timeout": "--shutdown-timeout-s",
    "-q": "--quantization",
}
# vLLM turns a switch off by either name: --no-enable-lora and --disable-lora.
OPPOSITES: Final = (
    ("--disable-", "--no-enable-"),
    ("--enable-", "--no-disable-"),
)


def known_name(flag: str, known: Collection[str]) -> str:
    """Return the name among `known` that `flag` is another spelling of, or else `flag` itself."""
    dashed = flag
    if flag.startswith("--"):
        dashed = flag.replace("_", "-")
    names = [dashed, OTHER_NAMES.get(dashed, dashed)]
    names += [other + dashed.removeprefix(start) for start, other in OPPOSITES if dashed.startswith(start)]
    return next((name for name in names if name in known), flag)


def known_arguments(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the arguments with flags by their names in `known`.

    The fields of a JSON flag become one argument `--flag={...}`. Raises ConfigError if a field has no value, or if the
    flag is given as a whole, too.
    """
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        if not name.startswith("-"):
            found.append(argument)
            continue
        whole = known_name(flag, known)
        if dot and whole in known:
            if not equals:
                value = _next_value(name, rest)
            _merge(objects.setdefault(whole, {}), _nested(path, value))
        else:
            found.append(known_name(name, known) + equals + value)
    for flag, fields in objects.items():
        if any(argument.partition("=")[0] == flag for argument in found):
            raise ConfigError(f"{flag} is given as a whole and by its fields; give one JSON object, or all fields")
        found.append(f"{flag}={json.dumps(fields)}")
    return found


def _next_value(name: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None:
        raise ConfigError(f"{name} has no value; give {name}=VALUE")
    return value


def _nested(path: str, text: str) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the path `a.b`. With `a.b+` the value is a list of the text's parts."""
    value = json_value(text, text)
    if path.endswith("+"):
        path = path.removesuffix("+")
        value = text.split(",")
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]  # a path has at least one key


def _merge(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add `more` to `found`, object by object. Lists are joined, and other values replaced."""
    for key, value in more.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            old += value
        else:
            found[key] = value

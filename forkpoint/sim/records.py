"""JSON objects of trace files, whose fields are checked as they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import Bounds, Checker, shown
from forkpoint.errors import TraceError

MAX_TOKENS: Final = 2**31 - 1  # tokens of a whole trace, whose ids are int32
TIMES: Final = Bounds(0.0, 1e13)  # seconds or milliseconds, also since 1970


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object of a trace file, and for errors where it stands. Raises TraceError for a wrong or missing field."""

    where: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, where: str, value: object) -> Record:
        if not isinstance(value, dict):
            raise TraceError(f"{where} is {shown(value)}; an object is needed")
        return cls(where, value)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def integer(self, name: str, low: int = 0, default: int | None = None) -> int:
        return self._check.integer(name, self._value(name, default), low, MAX_TOKENS)

    def time(self, name: str, default: float | None = None) -> float:
        return self._check.number(name, self._value(name, default), TIMES)

    def text(self, name: str) -> str:
        return self._check.text(name, self._value(name), MAX_TOKENS)

    def flag(self, name: str, default: bool) -> bool:
        return self._check.flag(name, self._value(name, default))

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, which may be missing."""
        return self._check.integers(name, self._value(name), MAX_TOKENS, 0, MAX_TOKENS)

    def names(self, name: str, default: list[int] | None = None) -> list[int | str]:
        """Return a list of integers and texts, which name blocks or tokens."""
        found: Any = self._value(name, default)
        if not isinstance(found, list) or not all(isinstance(item, int | str) for item in found):
            self._check.refuse(name, found, "a list of integers or texts")
        return found

    def records(self, name: str) -> list[Record]:
        """Return the objects of a list."""
        found = self._value(name)
        if not isinstance(found, list):
            self._check.refuse(name, found, "a list of objects")
        return [Record.of(f"{self.where}: {name}[{i}]", value) for i, value in enumerate(found)]

    def _value(self, name: str, default: object = None) -> object:
        """Return a field's value, `default` if it is missing or null."""
        found = self.values.get(name)
        if found is None:
            return default
        return found

    @property
    def _check(self) -> Checker:
        return Checker(TraceError, f"{self.where}: ")


def read_lines(path: Path, limit: int | None) -> Iterator[Record]:
    """Read one object a line. Blank lines are skipped. Raises TraceError, which names the line."""
    return islice(_lines(path), limit)


def _lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as lines:  # Windows begins texts with a byte order mark
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"line {number} of {path}"
                yield Record.of(where, parse_json(where, line))


def parse_json(where: str, text: str) -> object:
    """Parse JSON. Raises TraceError, which says where it stands in the trace."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where} is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise TraceError(f"{where} is nested too deeply") from error

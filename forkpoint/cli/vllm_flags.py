"""vLLM's flags that change nothing here, or ask for features that are missing here. vllm_flags.yaml lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import yaml

from forkpoint.checks import one_or_more

ON, OFF = "on", "off"
ANY: Final = "any"


class FlagNotice(str):
    """The log line of a given flag, used as its value in the namespace."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """A row of the table. The table's file describes the fields."""

    flags: str
    why: str
    values: str = ""
    is_logged: bool = False
    switch: bool = False
    nargs: str | None = None

    def refusal(self, value: str) -> str:
        """Return why `value` is not possible, and which values are."""
        others = ""
        if self.values and not self.switch:
            others = f"give {' or '.join(self.values.split())}, or "
        return f"{value} is not possible here: {self.why}; {others}leave it out"


TABLE_TEXT: Final = files("forkpoint.cli").joinpath("vllm_flags.yaml").read_text("utf-8")
LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast in C
TABLE: Final = tuple(VllmFlags(**row) for row in yaml.load(TABLE_TEXT, LOADER))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table, which --help does not show."""
    for row in TABLE:
        for flag in row.flags.split():
            names = flag.split("/")
            if row.switch:
                names.append("--no-" + names[0].removeprefix("--"))
            nargs: Any = 0 if row.switch else row.nargs
            parser.add_argument(
                *names, action=_Take, row=row, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def notice_lines(arguments: argparse.Namespace) -> list[str]:
    """Return the log lines of given flags that change nothing."""
    return [value for value in vars(arguments).values() if isinstance(value, FlagNotice)]


class _Take(argparse.Action):
    """Refuses values that are not allowed, and stores the others, or the log line of those that change nothing."""

    def __init__(self, *args: Any, row: VllmFlags, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._row = row

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self._row.switch:
            value = ON
            if (option_string or "").startswith("--no-"):
                value = OFF
        else:
            value = " ".join(one_or_more(values or ()))
        if self._row.values != ANY and value not in self._row.values.split():
            raise argparse.ArgumentError(self, self._row.refusal(value))
        if (self._row.is_logged or self._row.values == ANY) and not (self._row.switch and value == OFF):
            value = FlagNotice(f"{option_string} changes nothing here: {self._row.why}")
        setattr(namespace, self.dest, value)

"""vLLM's flags that change nothing here, or ask for features that are missing here."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from textwrap import fill
from typing import Any

from forkpoint.checks import one_or_more
from forkpoint.vllm_options import DEFAULT, OFF, ON, TABLE, VllmFlags


class FlagNotice(str):
    """The log line of a given flag, used as its value in the namespace."""

    __slots__ = ()


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table, which --help does not show."""
    for row in TABLE:
        for flag in row.flags.split():
            names = flag.split("/")
            if row.switch:
                names.append("--no-" + names[0].removeprefix("--"))
            nargs: Any = 0 if row.switch else row.nargs
            parser.add_argument(
                *names, action=VllmFlag, row=row, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def table_text() -> str:
    """Return all flags of the table, with the values that they accept and why."""
    wrap = partial(fill, width=shutil.get_terminal_size().columns, break_on_hyphens=False)
    indented = partial(wrap, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(f"{wrap(row.flags.replace('/', ' '))}\n{indented(row.explanation())}\n" for row in TABLE)


def notice_lines(arguments: argparse.Namespace) -> list[str]:
    """Return the log lines of given flags that change nothing."""
    return [value for value in vars(arguments).values() if isinstance(value, FlagNotice)]


class VllmFlag(argparse.Action):
    """Refuses values that are not allowed, and stores the others, or the log line of those that change nothing."""

    def __init__(self, *args: Any, row: VllmFlags, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._row = row
        self.explanation = row.explanation()

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
            if value == DEFAULT:
                return
        if not self._row.takes(value):
            raise argparse.ArgumentError(self, self._row.refusal(value))
        if self._row.logs(value):
            value = FlagNotice(f"{option_string} changes nothing here: {self._row.why}")
        setattr(namespace, self.dest, value)

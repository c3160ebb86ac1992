"""Shows measured values next to goals as a table, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import wrapped

HEAD = "| measure | vLLM 0.33.0 | floor | forkpoint | reach | met |\n|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Goal:
    """The value that another engine reached on the same device and protocol, and the value to reach."""

    other: str
    reach: float
    more_is_better: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.reach if self.more_is_better else value <= self.reach


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement. `value` and `floor` are in `unit`, and `value` is the median of `samples`."""

    name: str
    unit: str
    value: float
    floor: float | None
    goal: Goal
    samples: tuple[float, ...] = ()
    digits: int = 1

    @property
    def met(self) -> bool:
        return self.goal.is_met(self.value)

    @property
    def cells(self) -> str:
        floor = "" if self.floor is None else self._shown(self.floor)
        bound = f"{self._shown(self.goal.reach)} or {'more' if self.goal.more_is_better else 'less'}"
        met = "yes" if self.met else "**no**"
        return f"| {self.name} | {self.goal.other} | {floor} | {self._shown(self.value)} | {bound} | {met} |"

    def _shown(self, value: float) -> str:
        return f"{value:,.{self.digits}f} {self.unit}"


def write_json(path: Path, lines: Sequence[Line], about: dict[str, Any]) -> None:
    """Write all lines with their samples, and `about`, which says what was run and where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [{**asdict(line), "met": line.met} for line in lines]
    path.write_text(json.dumps({**about, "lines": values}, indent=2) + "\n")


def write_page(path: Path, lines: Sequence[Line], about: dict[str, Any], notes: Sequence[str]) -> None:
    """Write a page with the table and what is needed to repeat it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "\n".join(line.cells for line in lines)
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items() if name != "command")
    said = "\n".join(f"- {note}" for note in notes)
    page = f"""# The 9B shape on one GPU

    {about["command"]}

{facts}

{HEAD}
{rows}

{said}
"""
    path.write_text(wrapped(page))

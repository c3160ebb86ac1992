"""The result file: what vLLM's own scheduler found cached, and how the file was made."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "hits.json"


@dataclass(frozen=True, slots=True)
class Played:
    """The cached tokens of a case's requests, and the tokens of each step of the last one's prompt."""

    cached: list[int]
    chunks: list[int]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to start vLLM: its flags, what it chose, and the cases by key."""

    flags: str
    block_tokens: int
    match_unit: int  # tokens; a hit ends at a multiple of it
    cases: dict[str, Played]


@dataclass(frozen=True, slots=True)
class VllmResults:
    """All settings by name. `blocks` has the block size of other models by config file and setting."""

    version: str
    command: str
    date: str
    card: str
    model: str
    settings: dict[str, Setting]
    blocks: dict[str, dict[str, int]]


def read(path: Path = RESULTS) -> VllmResults:
    found = json.loads(path.read_text())
    settings = {
        name: Setting(**{**given, "cases": {key: Played(**case) for key, case in given["cases"].items()}})
        for name, given in found.pop("settings").items()
    }
    return VllmResults(settings=settings, **found)


def write(results: VllmResults, path: Path = RESULTS) -> None:
    """Write the file with a list of numbers on one line."""
    text = json.dumps(asdict(results), indent=1)
    path.write_text(re.sub(r"\[[\s\d,]+\]", lambda found: " ".join(found[0].split()), text) + "\n")

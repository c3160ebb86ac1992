"""What one run of `benchmarks.gpu_peer` measured, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


class PeerRunError(Exception):
    """A file does not hold a run of `benchmarks.gpu_peer`."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured value with its unit.

    `num_cached` has the cached tokens of each sample, if the part reports them. The README leaves out details.
    """

    name: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    num_cached: tuple[int, ...] = ()
    is_detail: bool = False

    @property
    def shown(self) -> str:
        """The value with its unit, with three or more digits, such as "10.7 ms" or "5,991 tokens/s"."""
        digits = 1
        if self.unit in ("ms", "tokens/s") and self.value >= 100:
            digits = 0
        return f"{self.value:,.{digits}f} {self.unit}"

    @property
    def line(self) -> str:
        """The value with all its samples, as the benchmark prints it."""
        samples = f" {list(self.samples)}" if self.samples else ""
        cached = f", cached {list(self.num_cached)}" if self.num_cached else ""
        return f"{self.name}: {self.value:,} {self.unit}{samples}{cached}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """The values of one engine, and what is needed to repeat them.

    `shorter` divides the lengths of all prompts. `config` is the model's config.json. `versions` maps package names to
    versions.
    """

    engine: str
    versions: dict[str, str]
    drafts: int
    shorter: int
    config: dict[str, Any]
    card: str
    commit: str
    date: str
    command: str
    measures: tuple[Measure, ...]

    @property
    def title(self) -> str:
        """The head of its column, such as "vLLM 0.33.0, 3 drafts". forkpoint's version is its commit."""
        name = "forkpoint"
        if self.engine == "vllm":
            name = f"vLLM {self.versions.get('vllm', '')}".rstrip()
        return f"{name}, {self.drafts} drafts" if self.drafts else name

    def with_measures(self, measures: Iterable[Measure]) -> PeerRun:
        return replace(self, measures=tuple(measures))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_run(path: Path) -> PeerRun:
    """Read a file that `PeerRun.write` wrote. Raises PeerRunError."""
    try:
        found = json.loads(path.read_text())
        measures = tuple(_measure(**measure) for measure in found.pop("measures"))
        return PeerRun(**found, measures=measures)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise PeerRunError(
            f"{path} does not hold a run of benchmarks.gpu_peer ({error!r}); write one with its --json"
        ) from error


def _measure(*, samples: Iterable[float], num_cached: Iterable[int], **others: Any) -> Measure:
    """Return the measure of a JSON object, in which tuples are lists."""
    return Measure(**others, samples=tuple(samples), num_cached=tuple(num_cached))

"""The workload and the results of the side-by-side benchmark."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the protocol, in tokens, and how often each phase is measured."""

    prompt: int = 4096
    extension: int = 64
    decode_prompt: int = 128
    decode: int = 64
    batch: int = 8
    repeats: int = 3

    @property
    def phases(self) -> tuple[str, ...]:
        return ("cold", "warm", "decode 1", f"decode {self.batch}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. `value` is seconds to the first token, or decoded tokens per second. `cached_tokens` is what the
    peer reports."""

    phase: str
    value: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All samples of one peer."""

    peer: str
    description: str
    samples: tuple[Sample, ...]

    def values(self, phase: str) -> list[float]:
        return [sample.value for sample in self.samples if sample.phase == phase]

    def median(self, phase: str) -> float:
        return statistics.median(self.values(phase))

    def best(self, phase: str) -> float:
        return (max if phase.startswith("decode") else min)(self.values(phase))

    def cached(self, phase: str) -> int:
        return max(sample.cached_tokens for sample in self.samples if sample.phase == phase)

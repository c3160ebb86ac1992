"""What is trained when: row lengths and learning rates as functions of progress, from 0 to 1."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the training. Until progress `until`, rows have one of `lengths` tokens, with these relative
    frequencies of batches."""

    until: float
    lengths: tuple[int, ...]
    shares: tuple[float, ...]


# Short rows first: copying from a few hundred tokens back is learnt soon, and carries over to longer rows.
PHASES = (
    Phase(0.25, (512, 1024), (0.5, 0.5)),
    Phase(0.55, (1024, 2048), (0.5, 0.5)),
    Phase(0.75, (1024, 2048, 4096), (0.2, 0.4, 0.4)),
    Phase(1.0, (1024, 2048, 4096, 8192), (0.1, 0.2, 0.25, 0.45)),
)


def row_length(progress: float, seed: int, index: int) -> int:
    """Return the row length of batch `index`."""
    phase = next((p for p in PHASES if progress < p.until), PHASES[-1])
    (length,) = random.Random(f"{seed} length {index}").choices(phase.lengths, phase.shares)
    return length


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A linear warm-up over the first steps, then a constant rate, then a linear decay to zero from progress
    `decay_from` on."""

    warmup_steps: int = 50
    decay_from: float = 0.45

    def factor(self, step: int, progress: float) -> float:
        decay = min(1.0, (1.0 - progress) / (1.0 - self.decay_from))
        return min(1.0, (step + 1) / self.warmup_steps) * max(0.0, decay)

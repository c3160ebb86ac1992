"""How threads of the CPU wait for each other."""

from __future__ import annotations

import os
from typing import Final

SPINS: Final = "10000"  # some 0.5 ms: with fewer, steps lose up to a tenth where nothing else runs


def wait_briefly() -> None:
    """Have OpenMP's threads sleep soon when others keep them waiting, if torch is not loaded yet. By default they spin
    for milliseconds, and where other programs run, on the core that the awaited thread needs: one answer then took 2.5
    times as long, 16 at once 5 times. What the environment says goes first."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

"""Settings of the CPU's threads."""

from __future__ import annotations

import os
from typing import Final

SPINS: Final = "10000"  # about 0.5 ms; with fewer, steps on an idle machine were up to 10 % slower


def wait_briefly() -> None:
    """Make OpenMP's threads sleep soon when they wait for others. Call it before torch is loaded.

    Without this they spin for milliseconds. If other programs run, they spin on the core that the awaited thread needs:
    one answer then took 2.5 times as long, 16 at once 5 times. A value in the environment wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

"""Progress of loading weights: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from tqdm import tqdm

from forkpoint.obs.logs import LOGGER

LINES_APART_S = 5.0  # seconds between two log lines
BAR_DELAY_S = 0.5  # seconds; faster loads need no bar
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class WeightsProgress:
    """Reports the progress of a load: call it with (bytes read, total bytes), first with 0.

    Use it as a context manager, whose end removes the bar.
    """

    def __init__(self, *, show_bar: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._show_bar = show_bar
        self._clock = clock
        self._bar: tqdm | None = None
        self._started_s = self._logged_s = clock()

    def __enter__(self) -> WeightsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, read_bytes: int, total_bytes: int) -> None:
        if not read_bytes:
            self._begin(total_bytes)
        elif self._bar is not None:
            self._bar.update(read_bytes - self._bar.n)
        elif self._clock() - self._logged_s >= LINES_APART_S and read_bytes < total_bytes:
            self._logged_s = self._clock()
            rest_s = (self._logged_s - self._started_s) * (total_bytes / read_bytes - 1)
            LOGGER.info("weights: %.0f %% read, about %.0f s left", 100 * read_bytes / total_bytes, rest_s)

    def _begin(self, total_bytes: int) -> None:
        self._started_s = self._logged_s = self._clock()
        LOGGER.info("weights: reading %s", _size(total_bytes))
        if self._show_bar:
            self._bar = tqdm(
                desc="Loading weights",
                total=total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                delay=BAR_DELAY_S,
                leave=False,
                dynamic_ncols=True,
            )


def _size(num_bytes: int) -> str:
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"

"""One request of a workload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forkpoint.errors import ConfigError

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Sent at `arrival_s` (None: when the pacing says so), or `think_s` after request `after` has ended.

    Its prompt is `content`, text or token ids; with `continues` these are ids, and the prompt and the answer of `after`
    come first.
    """

    content: str | TokenIds
    num_content_tokens: int
    num_output_tokens: int
    arrival_s: float | None = None
    after: int | None = None
    think_s: float = 0.0
    continues: bool = False


def checked(requests: list[BenchRequest]) -> list[BenchRequest]:
    """The requests; raises ConfigError where there is none."""
    if not requests:
        raise ConfigError("the dataset gives no request; check its file and the lengths asked for")
    return requests

"""One request of a workload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forkpoint.errors import ConfigError

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request, sent at `arrival_s` (None: chosen by the rate), or `think_s` after the request `after` has ended.

    `after` is an index in the workload. The prompt is `content`, a text or token ids. With `continues` it is token ids,
    and the prompt and answer of request `after` come first. `images` are data URLs that follow the text of a chat.
    """

    content: str | TokenIds
    num_content_tokens: int
    num_output_tokens: int
    arrival_s: float | None = None
    after: int | None = None
    think_s: float = 0.0
    continues: bool = False
    images: tuple[str, ...] = ()


def checked(requests: list[BenchRequest]) -> list[BenchRequest]:
    """Return `requests`. Raises ConfigError if there are none."""
    if not requests:
        raise ConfigError("the dataset has no request of the wanted lengths; check its file and the length options")
    return requests

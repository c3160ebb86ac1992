"""The tokens of a row that each of several ranks keeps (decode context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forkpoint.errors import ConfigError

Numbers = TypeVar("Numbers", bound=npt.NDArray[np.integer[Any]] | Tensor)  # integers on the host or on a device


@dataclass(frozen=True, slots=True)
class Deal:
    """The tokens of every row that one rank keeps. Ranks take turns with runs of `interleave` tokens.

    A rank stores its tokens of a row without gaps in its blocks. A run divides what a rank keeps of a block, so that
    all ranks need a row's next block at the same token, and one block id serves them all.
    """

    rank: int = 0
    num_ranks: int = 1
    interleave: int = 1

    def check(self, block_size: int) -> None:
        """Raise ConfigError if `block_size` tokens, which the rank keeps of a block, do not consist of whole runs."""
        if block_size % self.interleave:
            raise ConfigError(f"an interleave of {self.interleave} tokens does not divide a block of {block_size}")

    def owns(self, positions: Numbers) -> Any:
        """Return for each of these positions of a row whether the rank keeps its token, bool."""
        each: Any = positions
        return each // self.interleave % self.num_ranks == self.rank

    def places(self, positions: Numbers) -> Numbers:
        """Return, for the token at each position, how many earlier tokens of the row its own rank keeps."""
        each: Any = positions
        places: Numbers = each // (self.num_ranks * self.interleave) * self.interleave + each % self.interleave
        return places

    def count(self, lens: Numbers) -> Numbers:
        """Return how many of the first `lens` tokens of each row the rank keeps."""
        each: Any = lens
        period = self.num_ranks * self.interleave
        rest = each % period - self.rank * self.interleave
        counts: Numbers = each // period * self.interleave + rest.clip(0, self.interleave)
        return counts


ALL: Final = Deal()  # one rank keeps them

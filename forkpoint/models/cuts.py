"""The part of a tensor that one of several ranks has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.linear.scaled import ScaledMatrix
from forkpoint.ops.ranks import ALONE, Ranks

VOCABULARY_UNIT: Final = 64  # rows of the output head, which is padded to as many for each rank
_LAYER = re.compile(r"(.+?\.layers\.\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Cut:
    """Axis `axis` of a tensor (its only one, if it has one) is cut; a bias only where rows, axis 0, are.

    It has `sections` behind each other, each of so many units of so many elements, as (count, elements). A rank has its
    run of every section's units; where there are fewer than ranks, some have the same. No sections: one, of elements.
    With `padded` units are elements, and zeros behind the last make up a multiple of VOCABULARY_UNIT for each rank.
    """

    axis: int = 0
    sections: tuple[tuple[int, int], ...] = ()
    padded: bool = False


# By the last words of names, or the last one and a number behind it; None: whole on every rank.
Cuts: TypeAlias = dict[str, Cut | None]


@dataclass(frozen=True, slots=True)
class Part:
    """Intervals `spans` of axis `axis`, put together, of a tensor of shape `whole`; then zeros up to `length`."""

    whole: tuple[int, ...]
    axis: int
    spans: tuple[tuple[int, int], ...]
    length: int

    def of(self, tensor: Any) -> Tensor:
        """Out of the whole tensor, or of what safetensors gives slices of."""
        lead = (slice(None),) * self.axis
        pieces = [tensor[(*lead, slice(*span))] for span in self.spans]
        missing = self.length - sum(end - start for start, end in self.spans)
        if missing:
            shape = (*self.whole[: self.axis], missing, *self.whole[self.axis + 1 :])
            pieces.append(pieces[0].new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def of_scaled(self, codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> ScaledMatrix:
        """`codes` are the part's, `scales` the whole matrix's. Rows that do not end with blocks get a scale each.

        Raises ConfigError where columns of blocks would be cut.
        """
        *_, num_rows, width = self.whole
        if self.axis == len(self.whole) - 1:
            (start, end), *_ = self.spans
            if columns == width:
                return ScaledMatrix(codes, scales, rows, codes.shape[-1], dtype)
            if start % columns or (end % columns and end != width):
                raise ConfigError(
                    f"tensor_parallel_size cuts a matrix of {width} columns into pieces of {end - start}, within "
                    f"blocks of {columns} that have one scale; give a smaller size, or --deterministic, which cuts none"
                )
            return ScaledMatrix(codes, scales[..., start // columns : -(-end // columns)], rows, columns, dtype)
        inner = [bound % rows and bound != num_rows for span in self.spans for bound in span]
        if any(inner) or any(end % rows for _, end in self.spans[:-1]):
            scales, rows = scales.repeat_interleave(rows, -2), 1
        pieces = [scales[..., start // rows : -(-end // rows), :] for start, end in self.spans]
        return ScaledMatrix(codes, torch.cat(pieces, -2), rows, columns, dtype)


@dataclass(frozen=True, slots=True)
class Shares:
    """How one rank's tensors are cut out of the whole ones. `layers` has the cuts of each layer, by how its names begin
    and then by their last words; what is not there is whole on every rank."""

    ranks: Ranks = ALONE
    layers: Mapping[str, Cuts] = field(default_factory=dict)
    head: Cut | None = None

    def part(self, name: str, shape: Sequence[int]) -> Part | None:
        """Of the tensor that this rank has in `shape`; None: all of it."""
        cut = self._find(name)
        if cut is None:
            return None
        axis, size = cut.axis % len(shape) if len(shape) > 1 else 0, self.ranks.size
        sections = cut.sections or ((shape[axis] * size, 1),)
        length, spans, start = sum(units * elements for units, elements in sections), list[tuple[int, int]](), 0
        for units, elements in sections:
            first, last = padded_span(units, self.ranks) if cut.padded else unit_span(units, self.ranks)
            spans.append((start + min(first, units) * elements, start + min(last, units) * elements))
            start += units * elements
        own = shape[axis] if cut.padded else sum(end - first for first, end in spans)
        return Part((*shape[:axis], length, *shape[axis + 1 :]), axis, tuple(spans), own)

    def _find(self, name: str) -> Cut | None:
        if name == "lm_head.weight":
            return self.head
        found = _LAYER.fullmatch(name)
        if found is None or found[1] not in self.layers:
            return None
        cuts, is_bias = self.layers[found[1]], name.endswith(".bias")
        parts = [part for part in found[2].split(".") if part not in ("weight", "bias")]
        words = [part for part in parts if not part.isdigit()]
        named = (".".join(words[-2:]), f"{words[-1]}.{parts[-1]}", words[-1])
        cut = next((cuts[name] for name in named if name in cuts), None)
        return None if cut is not None and is_bias and cut.axis != 0 else cut


WHOLE: Final = Shares()


def share(count: int, what: str, ranks: Ranks, shared: bool = False) -> int:
    """How many each rank has; with `shared` fewer than there are ranks belong to several. Raises ConfigError."""
    if count % ranks.size and not (shared and ranks.size % count == 0):
        raise ConfigError(f"tensor_parallel_size={ranks.size} does not divide the model's {count} {what}")
    return max(1, count // ranks.size)


def rows(*sections: tuple[int, int]) -> Cut:
    """Of a tensor whose rows are these sections."""
    return Cut(0, sections)


def inward(name: str, num_rows: int, ranks: Ranks) -> Cuts:
    """Of a RowParallel layer, which takes in what was cut: by its inputs, or, where ranks gather, its outputs."""
    if not ranks.gathers:
        return {name: Cut(-1)}
    return {name: Cut(0)} if ranks.cuts_rows(num_rows) else {}


def unit_span(units: int, ranks: Ranks) -> tuple[int, int]:
    """The run of units that a rank has."""
    first = ranks.rank * units // ranks.size
    return first, first + max(1, units // ranks.size)


def padded_span(units: int, ranks: Ranks) -> tuple[int, int]:
    """The same where zeros are put behind the last unit, and may be all that a rank has."""
    if ranks.size == 1:
        return 0, units
    length = -(-units // (VOCABULARY_UNIT * ranks.size)) * VOCABULARY_UNIT
    return ranks.rank * length, (ranks.rank + 1) * length

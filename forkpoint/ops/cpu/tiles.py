"""The choice of the linear operator on a machine with bf16 matrix tiles (AMX)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from forkpoint.ops.linear.packed import PackedMatrix
from forkpoint.ops.linear.scaled import Matrix, dense
from forkpoint.ops.table import Linear, PrepareLinear

TILE_ROWS = 16
WIDENED_ROWS = 32  # rows; up to here widening a weight in 4 bits takes longer than the product
FEW_ROWS = 12  # rows; up to here reading the weights dominates, and our operator reads them once


def has_matrix_tiles() -> bool:
    """Return whether oneDNN multiplies bf16 matrices in hardware tiles, many times faster than fp32 vectors."""
    return bool(torch.cpu._is_amx_tile_supported())


class Wide(NamedTuple):
    """A weight for products of many rows, and its bias. `weight` is in oneDNN's order; None: it is widened each time.

    oneDNN would put a plain weight in its own order at every call, which takes up to half of a product's time.
    """

    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Matrix, bias: Tensor | None) -> Self:
        if isinstance(weight, PackedMatrix):  # a widened copy would take four times its memory
            return cls(None, bias)
        return cls(torch.ops.mkldnn._reorder_linear_weight(dense(weight).contiguous()), bias)


@dataclass(frozen=True, slots=True)
class TileLinear:
    """Uses our operator for a few rows, and oneDNN for more.

    Rows are padded to one of few sizes, because oneDNN generates and keeps code for each number of rows, which takes
    longer than the product. bf16 weights are held twice, and embeddings that are also the head three times. The two
    operators round differently, so a row's bits depend on the batch; deterministic tables do not use this.
    """

    prepare_few: PrepareLinear
    few: Linear
    widen: Callable[[Any], Tensor]  # from a weight in 4 bits that `prepare_few` packed

    def prepare(self, weight: Matrix, bias: Tensor | None) -> tuple[Any, Wide | None]:
        """Pack the weight for a few rows and for many. The latter is None for fp32, which tiles do not support."""
        wide = Wide.of(weight, bias) if weight.dtype == torch.bfloat16 else None
        return self.prepare_few(weight, bias), wide

    def __call__(self, x: Tensor, packed: tuple[Any, Wide | None]) -> Tensor:
        """Multiply `x[T, K]` by the weight; return `y[T, N]`."""
        (few, many), num_rows = packed, x.shape[0]
        if many is None or num_rows <= (WIDENED_ROWS if many.weight is None else FEW_ROWS):
            return self.few(x, few)
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        if many.weight is None:
            return torch.nn.functional.linear(x, self.widen(few), many.bias)[:num_rows]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, many.weight, many.bias, "none", [], "")
        return y[:num_rows]


def padded_rows(num_rows: int) -> int:
    """Return the next of the sizes 16, 32, .. 128, 160, .. 256, 320, ..: four per doubling, and at least a tile."""
    unit = max(TILE_ROWS, 1 << max(num_rows - 1, 0).bit_length() >> 3)
    return -(-num_rows // unit) * unit

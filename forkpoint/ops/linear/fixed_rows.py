"""A linear layer whose rows do not depend, bit for bit, on the batch.

BLAS libraries choose kernels and splits by the shape of a product, so a row's bits depend on how many rows are
beside it. Here a product is cut into blocks of a few sizes, padded, and the sizes in use are ones that were seen
to give the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.reference import PackedLinear

CANDIDATES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_SHIFT = 5  # rows by which the trial is rotated, to see each row at another place in its block

_Key = tuple[int, int, bool, torch.dtype, torch.device, int]


class FixedRowsLinear:
    """`linear` in blocks of sizes that agree.

    Kernels are chosen by shape, dtype and number of threads, never by the numbers, so one trial on random
    numbers per such key, at its first use, tells which sizes agree with the largest: each element of each row,
    at two places in a block and with other neighbours.
    """

    def __init__(self) -> None:
        self._sizes: dict[_Key, tuple[int, ...]] = {}

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x[T, K] -> y[T, N]` in x's dtype."""
        return _in_blocks(x.contiguous(), packed, self.sizes(packed))

    def sizes(self, packed: PackedLinear) -> tuple[int, ...]:
        """The block sizes for weights of this shape, largest first."""
        weight = packed.weight
        key = (*weight.shape, packed.bias is not None, weight.dtype, weight.device, torch.get_num_threads())
        if key not in self._sizes:
            self._sizes[key] = _agreeing(packed)
        return self._sizes[key]


def _agreeing(packed: PackedLinear) -> tuple[int, ...]:
    weight = packed.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(CANDIDATES[0], weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    want: Tensor | None = None
    found: list[int] = []
    for size in CANDIDATES:
        got = _in_blocks(x, packed, (size,))
        moved = _in_blocks(x.roll(_SHIFT, 0), packed, (size,)).roll(-_SHIFT, 0)
        if torch.equal(got, moved) and (want is None or torch.equal(got, want)):
            want = got
            found.append(size)
    # One row alone is always the same product, whatever else fails.
    return tuple(found) or CANDIDATES[-1:]


def _in_blocks(x: Tensor, packed: PackedLinear, sizes: tuple[int, ...]) -> Tensor:
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, packed.weight.shape[0])
    start = 0
    for size in sizes:
        while num_rows - start >= size:
            out[start : start + size] = F.linear(x[start : start + size], packed.weight, packed.bias)
            start += size
    if start < num_rows:
        rest = num_rows - start
        block = x.new_zeros(sizes[-1], x.shape[1])
        block[:rest] = x[start:]
        out[start:] = F.linear(block, packed.weight, packed.bias)[:rest]
    return out

"""A linear layer whose rows do not depend, bit for bit, on the batch.

BLAS libraries choose kernels and splits by the shape of a product, so a row's bits depend on the number of rows. Here a
product is cut into padded blocks of a few sizes. Only sizes that give the same bits in a trial are used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ops.linear.reference import PackedLinear

CANDIDATES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_SMALL = 16  # rows; small batches are padded to at most about this size
_MIN_ROWS = 16  # rows of a trial at least
_SHIFT = 5  # rows by which a trial is rotated, so that each row is seen at two places in its block
_ALIGNMENT = 64  # bytes; BLAS kernels handle the start of a row by its alignment

_Key = tuple[int, int, bool, torch.dtype, torch.device, int]


class FixedRowsLinear:
    """Computes `linear` in blocks whose sizes give the same bits.

    The library chooses kernels by shape, dtype and number of threads, never by values. One trial per such key, at its
    first use, finds the sizes that agree for every element of a row, at two places in a block and with other rows.
    """

    def __init__(self) -> None:
        self._sizes: dict[_Key, tuple[int, ...]] = {}

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Multiply `x[T, K]` by the weight; return `y[T, N]` in x's dtype."""
        return _in_blocks(x.contiguous(), packed, self.sizes(packed))

    def sizes(self, packed: PackedLinear) -> tuple[int, ...]:
        """Return the block sizes for weights of this shape, largest first."""
        weight = packed.weight
        key = (*weight.shape, packed.bias is not None, weight.dtype, weight.device, torch.get_num_threads())
        if key not in self._sizes:
            self._sizes[key] = _agreeing(packed)
        return self._sizes[key]


def _trial_operands(packed: PackedLinear) -> tuple[Tensor, PackedLinear]:
    """Return rows and weights of the same shape whose products cancel, so that only rounding errors remain.

    Every other order of summation then changes the result. With ordinary numbers, rounding to bfloat16 would hide it.
    """
    num_outputs, width = packed.weight.shape
    device, dtype = packed.weight.device, packed.weight.dtype
    generator = torch.Generator(device).manual_seed(0)
    half = width // 2
    order = torch.randperm(2 * half, generator=generator, device=device)
    x = torch.zeros(CANDIDATES[0], width, device=device, dtype=dtype)
    x[:, :half].normal_(generator=generator)
    x[:, half : 2 * half] = x[:, :half]
    x[:, : 2 * half] = x[:, order]
    weight = torch.zeros(num_outputs, width, device=device, dtype=dtype)
    weight[:, :half].normal_(generator=generator)
    weight[:, half : 2 * half] = -weight[:, :half]
    weight[:, : 2 * half] = weight[:, order]
    return x, PackedLinear(weight, None if packed.bias is None else torch.zeros_like(packed.bias))


def _agreeing(packed: PackedLinear) -> tuple[int, ...]:
    """Return the largest set of agreeing sizes that includes a size of at most _SMALL, largest first."""
    x, trial = _trial_operands(packed)
    classes: list[tuple[Tensor, list[int]]] = []
    for size in CANDIDATES:
        part = x[: max(2 * size, _MIN_ROWS)]
        got = _in_blocks(part, trial, (size,))
        if not torch.equal(got, _in_blocks(part.roll(_SHIFT, 0), trial, (size,)).roll(-_SHIFT, 0)):
            continue
        same = next((sizes for want, sizes in classes if torch.equal(want[: len(got)], got)), None)
        if same is None:
            classes.append((got, [size]))
        else:
            same.append(size)
    small = [tuple(sizes) for _, sizes in classes if sizes[-1] <= _SMALL]
    # A block of one row is always the same product, even if no other sizes agree.
    return max(small, key=len, default=CANDIDATES[-1:])


def _in_blocks(x: Tensor, packed: PackedLinear, sizes: tuple[int, ...]) -> Tensor:
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, packed.weight.shape[0])
    start = 0
    for size in sizes:
        while num_rows - start >= size:
            block = x[start : start + size]
            if block.data_ptr() % _ALIGNMENT:
                block = block.clone()
            out[start : start + size] = F.linear(block, packed.weight, packed.bias)
            start += size
    if start < num_rows:
        rest = num_rows - start
        block = x.new_zeros(sizes[-1], x.shape[1])
        block[:rest] = x[start:]
        out[start:] = F.linear(block, packed.weight, packed.bias)[:rest]
    return out

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

CANDIDATES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_SMALL = 16  # a decode batch must not be padded much further than this
_MIN_ROWS = 16  # of a trial
_SHIFT = 5  # rows by which a trial is rotated, to see each row at another place in its block
_ALIGNMENT = 64  # bytes; BLAS kernels treat the head of a row by its address

_Key = tuple[int, int, bool, torch.dtype, torch.device, int]


class FixedRowsLinear:
    """`linear` in blocks of sizes that agree.

    Kernels are chosen by shape, dtype and number of threads, never by the numbers. So one trial per such key,
    at its first use, tells which sizes agree: for every element of a row, at two places in a block and beside
    other rows.
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


def _trial_operands(packed: PackedLinear) -> tuple[Tensor, PackedLinear]:
    """Rows and weights of the same shape whose products cancel: each sum is the sum of its roundings.

    Then any other order of summation shows, where rounding to bfloat16 would hide it from ordinary numbers.
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
    """The largest set of agreeing sizes that reaches down to _SMALL, largest size first."""
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
    # One row alone is always the same product, whatever else fails.
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

"""Matrices that are joined from several stored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import EllipsisType

import torch
from torch import Tensor

from forkpoint.models.cuts import Cut
from forkpoint.models.quantization import Form, common_form
from forkpoint.models.weights import WeightSource
from forkpoint.ops.linear.packed import MIDDLE, PER_WORD, PackedMatrix
from forkpoint.ops.linear.scaled import BLOCK, Matrix, ScaledMatrix, dense


class JoinedMatrix:
    """A matrix `shape[..., N, K]` that parts are copied into; zeros elsewhere.

    All parts and the matrix have `form`; None: not quantised, and parts are widened. In FP8 the matrix has one scale
    for each block of 128 rows if the parts do and `whole_blocks` says that each part starts at a block. Otherwise it
    has one scale for each row.
    """

    def __init__(self, source: WeightSource, shape: Sequence[int], form: Form | None, whole_blocks: bool) -> None:
        self.matrix: Matrix
        if form is not None and form.kind == "fp8":
            self.matrix = _empty_scaled(source, shape, whole_blocks)
        elif form is not None and shape[-1] % PER_WORD == 0:
            self.matrix = _empty_packed(source, shape, form)
        else:
            self.matrix = torch.zeros(*shape, dtype=source.dtype, device=source.device)

    def put(self, part: Matrix, start: int, at: int | slice | EllipsisType = ...) -> None:
        """Copy `part` to row `start` and column 0 of `matrix`, or of the matrices with the leading index `at`.

        `matrix` may be replaced by one with finer scales, so read it after the last part.
        """
        *_, num_rows, width = part.shape
        whole = self.matrix
        if isinstance(whole, Tensor):
            whole[at, start : start + num_rows, :width] = dense(part)
        elif isinstance(whole, PackedMatrix):
            assert isinstance(part, PackedMatrix), "a joint in 4 bits has parts in 4 bits"
            _put_packed(whole, part.regrouped(whole.group), (at, slice(start, start + num_rows)))
        else:
            assert isinstance(part, ScaledMatrix), "a joint in FP8 has parts in FP8"
            self._put_scaled(whole, part, start, at)

    def _put_scaled(self, whole: ScaledMatrix, part: ScaledMatrix, start: int, at: int | slice | EllipsisType) -> None:
        *_, num_rows, width = part.shape
        if part.rows < whole.rows:
            self.matrix = whole = whole.by_row()
        if part.rows != whole.rows:
            part = part.by_row()
        first, (*_, scale_rows, scale_columns) = start // whole.rows, part.scales.shape
        # copied as bytes, because not every device can copy FP8 to a part of a tensor
        codes = part.codes.view(torch.uint8)
        whole.codes.view(torch.uint8)[at, start : start + num_rows, :width] = codes
        whole.scales[at, first : first + scale_rows, :scale_columns] = part.scales


def _empty_scaled(source: WeightSource, shape: Sequence[int], whole_blocks: bool) -> ScaledMatrix:
    *lead, num_rows, width = shape
    by_block = source.format is not None and source.format.by_block
    rows, columns = BLOCK if by_block and whole_blocks else 1, BLOCK if by_block else width
    codes = torch.zeros(*shape, dtype=source.codes, device=source.device)
    scales = torch.ones(*lead, -(-num_rows // rows), -(-width // columns), device=source.device)
    return ScaledMatrix(codes, scales, rows, columns, source.dtype)


def _empty_packed(source: WeightSource, shape: Sequence[int], form: Form) -> PackedMatrix:
    """Return a matrix in 4 bits of zeros: a scale of 0 makes them whatever the codes are."""
    *lead, num_rows, width = shape
    groups = (*lead, num_rows, -(-width // form.group))
    words = torch.zeros(*lead, num_rows, width // PER_WORD, dtype=torch.int32, device=source.device)
    integers = form.kind == "integer"
    scales = torch.zeros(groups, dtype=torch.float16 if integers else torch.uint8, device=source.device)
    factors = torch.ones(*lead, num_rows, 1, device=source.device)
    zeros = torch.full(groups, MIDDLE, dtype=torch.uint8, device=source.device) if integers else None
    return PackedMatrix(words, scales, factors, zeros, form.group, source.dtype, form.column_order(source.device))


def _put_packed(whole: PackedMatrix, part: PackedMatrix, at: tuple[int | slice | EllipsisType, slice]) -> None:
    pairs = [(whole.words, part.words), (whole.scales, part.scales), (whole.factors, part.factors)]
    if whole.zeros is not None and part.zeros is not None:
        pairs.append((whole.zeros, part.zeros))
    for kept, given in pairs:
        kept[(*at, slice(given.shape[-1]))] = given


def join_rows(source: WeightSource, rows: Mapping[str, Cut], columns: int) -> Matrix:
    """Join the matrices `name.weight` with these rows (one rank's) into `[sum(rows), columns]`.

    The result is quantised if all of them are, in the same form.
    """
    names, counts = [f"{name}.weight" for name in rows], [cut.length for cut in rows.values()]
    form, whole_blocks = common_form(map(source.form, names)), not any(count % BLOCK for count in counts[:-1])
    joined = JoinedMatrix(source, (sum(counts), columns), form, whole_blocks)
    for name, cut, end in zip(names, rows.values(), accumulate(counts), strict=True):
        joined.put(source.get_matrix(name, (cut.length, columns), cut), end - cut.length)
    return joined.matrix

"""Triton 3.7's interpreter, mended and made quicker for all tests of a process."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from tests.ops.interpreter_operators import share_types, shorten_operators


def prepare_interpreter() -> None:
    _teach_products()
    _teach_float8()
    _hurry()
    share_types()
    shorten_operators()


def _teach_products() -> None:
    """Mend three faults of `tl.dot` in Triton 3.7's interpreter.

    It multiplies the 16-bit integers in which it keeps bfloat16. It takes fp32 with all its bits where TF32 is asked
    for. NumPy's product of two fp32 matrices adds up a row in an order that depends on the row's place, which no tensor
    core does: sums in float64 make the order invisible.
    """
    plain = interpreter.InterpreterBuilder.create_dot

    def numbers(handle: Any, cuts: bool) -> Any:
        """Return the numbers of an operand, with `cuts` as tensor cores take fp32 for TF32."""
        kind = handle.dtype.scalar
        if kind == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        if kind.primitive_bitwidth == 8:
            return interpreter._convert_float(handle.data, kind, tl.float16, None).view(np.float16)
        if cuts and kind == tl.float32:
            return (np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return handle.data

    def create_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, *rest: Any) -> Any:
        if total.data.dtype != np.float32:
            return plain(self, a, b, total, precision, *rest)
        cuts = precision == ir.INPUT_PRECISION.TF32
        product = np.matmul(numbers(a, cuts), numbers(b, cuts), dtype=np.float64)
        return interpreter.TensorHandle((product + total.data).astype(np.float32), total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _teach_float8() -> None:
    """Triton 3.7's interpreter rounds 127 to 64 and reads NaN as 480: torch converts instead."""
    plain = interpreter.InterpreterBuilder.create_fp_to_fp
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}

    def create_fp_to_fp(self: Any, src: Any, to: Any, mode: Any) -> Any:
        given, wanted = src.dtype.scalar, to.scalar
        if tl.float8e4nv not in (given, wanted):
            return plain(self, src, to, mode)
        converted = torch.from_numpy(src.data).view(kinds[given]).to(kinds[wanted])
        numbers = (
            converted
            if wanted == tl.float32
            else converted.view(torch.uint8 if wanted == tl.float8e4nv else torch.uint16)
        )
        return interpreter.TensorHandle(numbers.numpy(), wanted)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _hurry() -> None:
    """What the interpreter does for nothing was half of its time: it puts its own functions into `triton.language`
    at each call of a kernel or of a function within, and computes checks of overflow that nobody reads without
    `debug`."""

    def put(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # What `builtin` wraps, without its check that there is a `_semantic`.
        plain, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return plain(*args, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = put
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    plain, of_number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: (plain if kind.scalar.is_ptr() else of_number)(kind.scalar)
    convert = interpreter._convert_float

    @functools.wraps(convert)
    def convert_float(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if given == tl.bfloat16 and wanted == tl.float32:  # its bits are the upper half
            return np.left_shift(data.view(np.uint16), 16, dtype=np.uint32)
        if given == tl.float32 and wanted == tl.bfloat16 and mode is None:  # cut off, which Triton's way also does
            return np.right_shift(np.ascontiguousarray(data).view(np.uint32), 16).astype(np.uint16)
        return convert(data, given, wanted, mode)

    interpreter._convert_float = convert_float

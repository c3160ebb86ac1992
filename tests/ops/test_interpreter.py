"""The short ways through Triton's interpreter give what Triton's own way gives: types, bits and errors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from tests.ops.interpreter_operators import ARITHMETIC, COMPARISONS
from tests.ops.triton_cases import IS_INTERPRETED, triton_ops

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles the kernels")

KINDS = {
    tl.float32: np.float32,
    tl.float16: np.float16,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint32: np.uint32,
    tl.int1: np.bool_,
}
SHAPES = [(), (4,), (2,), (1, 4), (4, 1), (2, 4)]
NUMBERS = [
    0,
    -0.0,
    3,
    -2,
    2.5,
    1e-40,
    1e300,
    2**31 - 1,
    -(2**31),
    2**31,
    2**40,
    True,
    float("nan"),
    tl.constexpr(5),
    None,
]
RNG = np.random.default_rng(0)


def tensor(kind: tl.dtype, shape: tuple[int, ...]) -> Any:
    data = RNG.integers(-3, 4, shape or (1,))
    if kind is tl.float32:
        data = data / 2
        data.flat[0] = 1e-40  # what NUMBERS has too, where fp32 rounds it
    pointee = tl.pointer_type(tl.float32)
    kind, dtype = (pointee, np.dtype(np.uint64)) if kind is tl.void else (kind, np.dtype(KINDS[kind]))
    return tl.tensor(TensorHandle(data.astype(dtype), kind), tl.block_type(kind, shape) if shape else kind)


def tried(call: Any, *operands: Any) -> Any:
    """Return what an operator gives, as something to compare: the type and the bits, or the error."""
    try:
        with np.errstate(all="ignore"):
            result = call(*operands)
    except Exception as error:
        return type(error), str(error)
    data = result.handle.data
    return str(result.type), str(result.dtype), data.dtype, data.shape, data.tobytes()


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    triton_ops()


@pytest.mark.parametrize("name", [*(f"__{side}{name}__" for name in ARITHMETIC for side in ("", "r"))])
def test_arithmetic(name: str) -> None:
    compare(name)


@pytest.mark.parametrize("name", [f"__{name}__" for name in COMPARISONS])
def test_comparisons(name: str) -> None:
    compare(name)


def compare(name: str) -> None:
    short = getattr(tl.tensor, name)
    plain = inspect.unwrap(short)
    assert plain is not short
    lefts = [tensor(kind, shape) for kind in (*KINDS, tl.void) for shape in SHAPES]
    for left in lefts:
        for right in [*NUMBERS, tl.constexpr(5), *(tensor(kind, shape) for kind in KINDS for shape in SHAPES)]:
            assert tried(short, left, right) == tried(plain, left, right), (str(left.type), right)


@pytest.mark.parametrize("shape", SHAPES)
def test_new_axes(shape: tuple[int, ...]) -> None:
    short, whole = tl.tensor.__getitem__, slice(None)
    for index in [None, whole, (None,), (None, whole), (whole, None), (whole, None, whole), (None, whole, None), (0,)]:
        value = tensor(tl.float32, shape)
        assert tried(short, value, index) == tried(inspect.unwrap(short), value, index)


def test_conversions_cut_off_as_tritons() -> None:
    bits = RNG.integers(0, 2**32, 4096, dtype=np.uint32)
    bits = bits[(bits & 0x7F800000 != 0) | (bits << 1 == 0)]  # Triton's way is wrong for subnormal numbers
    bits = np.concatenate([bits, np.array([0, 1 << 31, 0x7F800000, 0x7F800001], np.uint32)])
    short = interpreter._convert_float
    got, want = (way(bits.view(np.float32), tl.float32, tl.bfloat16, None) for way in (short, inspect.unwrap(short)))
    assert np.array_equal(got, want) and got.dtype == want.dtype and got.shape == want.shape


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_loads_and_stores(kind: tl.dtype, shape: tuple[int, ...]) -> None:
    memory, size = np.arange(8).astype(KINDS[kind]), shape or (1,)
    places = memory.ctypes.data + np.arange(np.prod(size), dtype=np.uint64).reshape(size) * memory.itemsize
    pointee = tl.pointer_type(kind)
    pointer = tl.tensor(TensorHandle(places, pointee), tl.block_type(pointee, shape) if shape else pointee)

    def stored(store: Any, *operands: Any) -> Any:
        """Return the memory after a store and its error, if there is one."""
        memory[:] = np.arange(8)
        try:
            store(pointer, *operands)
        except Exception as error:
            return type(error), str(error), memory.tobytes()
        return memory.tobytes()

    load, store = inspect.unwrap(tl.load), inspect.unwrap(tl.store)
    assert load is not tl.load and store is not tl.store
    for mask in (None, True, *(tensor(tl.int1, each) for each in (shape, (), (4,)))):
        for other in (*NUMBERS, 0.0, tensor(kind, shape), tensor(tl.int32, ())):
            assert tried(tl.load, pointer, mask, other) == tried(load, pointer, mask, other), (mask, other)
        for value in (0, 2.5, *(tensor(each, shape) for each in KINDS), tensor(kind, ()), tensor(kind, (4,))):
            assert stored(tl.store, value, mask) == stored(store, value, mask), (mask, value)

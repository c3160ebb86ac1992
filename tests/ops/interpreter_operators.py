"""Short ways through the operators that kernels use most, for `tests/ops/interpreter.py`.

Triton's interpreter takes 10 to 40 µs for an operator, nearly all of it for the types of operands and result. The types
are plain where both operands have the same type of numbers, or are a pointer and an offset. Other operands take
Triton's way, with its rules and its errors. `tests/ops/test_interpreter.py` compares both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as _interpreter
from triton._utils import validate_block_shape
from triton.runtime import interpreter

core = tl.core
Compute = Callable[[Any, Any], Any]
FLOATS, INTS, BITS = (tl.float32,), (tl.int32, tl.int64), (tl.int1, tl.int32, tl.int64)
ARITHMETIC: dict[str, tuple[Compute, tuple[tl.dtype, ...]]] = {
    "add": (np.add, FLOATS + INTS),
    "sub": (np.subtract, FLOATS + INTS),
    "mul": (np.multiply, FLOATS + INTS),
    "truediv": (np.divide, FLOATS),
    "floordiv": (lambda a, b: (a - np.fmod(a, b)) // b, INTS),
    "mod": (np.fmod, INTS),
    "and": (np.bitwise_and, BITS),
    "or": (np.bitwise_or, BITS),
    "lshift": (np.left_shift, INTS),
    "rshift": (np.right_shift, INTS),
}
COMPARISONS: dict[str, Compute] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
# Types that a load and a store take as they are; Triton keeps a truth value in 8 bits.
NUMBERS = frozenset(map(id, (tl.float32, tl.float16, tl.int32, tl.int64)))
INT32 = range(-(2**31), 2**31)
LEAST, MOST = 2.0**-126, (2 - 2**-23) * 2.0**127  # of normal numbers of fp32; Triton compares others in fp64


def share_types() -> None:
    """Make the type of a block once for each type of elements and shape, with what the interpreter knows of it. It made
    lists of constants for each value, and compared them element by element, which was a third of its time."""

    @functools.cache
    def of_block(*sizes: int) -> tuple[Any, int, Any]:
        """Return the shape of a block and its number of elements for its type, and both for its values."""
        count = validate_block_shape(sizes)
        return core.tuple(sizes), count, (core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(count))

    def make_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        made = element_ty.blocks.get(sizes)
        if made is None:
            made = object.__new__(cls)
            made.element_ty, made.sizes = element_ty, sizes
            made.shape, made.numel, made.of_values = of_block(*sizes)
            element_ty.blocks[sizes] = made
        return made

    def make_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values

    same_lists, same_blocks = core.tuple.__eq__, core.block_type.__eq__

    def equal(self: Any, other: Any) -> Any:
        if isinstance(other, list) and all(type(size) is int for size in other):
            return core.constexpr(self.values == other)
        return same_lists(self, other)

    core.dtype.sizes, core.dtype.of_values = (), (core.tuple([]), core.constexpr(1))
    core.dtype.blocks = functools.cached_property(lambda self: {})
    core.dtype.blocks.__set_name__(core.dtype, "blocks")
    core.block_type.__new__, core.block_type.__init__ = make_type, lambda self, *_: None
    core.block_type.__eq__ = lambda self, other: self is other or same_blocks(self, other)
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__, core.tuple.__eq__ = make_value, equal


def shorten_operators() -> None:
    """Give Triton's tensors the short ways, after the interpreter has put its own functions in place."""
    for name, (compute, kinds) in ARITHMETIC.items():
        _shorten(f"__{name}__", compute, kinds)
        _shorten(f"__r{name}__", functools.partial(_turned, compute), kinds)
    for name, compute in COMPARISONS.items():
        _shorten(f"__{name}__", compute, FLOATS + BITS, compares=True)
    _shorten_offsets()
    _shorten_getitem()
    _shorten_types()
    _shorten_memory()


def _turned(compute: Compute, a: Any, b: Any) -> Any:
    return compute(b, a)


def tensor_of(data: Any, kind: Any, type: Any) -> Any:
    """Return a tensor of the type `type`, whose elements have the type `kind`."""
    handle, made = object.__new__(interpreter.TensorHandle), object.__new__(core.tensor)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    made.handle, made.type, made.dtype = handle, type, kind
    made.shape, made.numel = type.of_values
    return made


def type_of(kind: Any, sizes: tuple[int, ...]) -> Any:
    """Return the type of blocks with these sizes, or `kind` for a scalar."""
    return (kind.blocks.get(sizes) or core.block_type(kind, sizes)) if sizes else kind


@functools.cache
def joined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the sizes of two operands' result, None if they do not fit."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


def _constant(value: Any, kind: Any, compares: bool) -> Any:
    """Return a number as an operand next to elements of the type `kind`, None if Triton has to decide."""
    if type(value) is core.constexpr:
        value = value.value
    if type(value) is int and value in INT32:
        return None if kind is tl.int1 else value
    if type(value) is float and kind is tl.float32:
        if not compares:
            return value or 0  # Triton's constants have no negative zero
        return value if value == 0 or LEAST <= abs(value) <= MOST else None
    return None


def _shorten(name: str, compute: Compute, kinds: Iterable[tl.dtype], compares: bool = False) -> None:
    plain, tensor = getattr(core.tensor, name), core.tensor
    known, ints = frozenset(map(id, kinds)), frozenset(map(id, INTS))

    @functools.wraps(plain)
    def operator(self: Any, other: Any) -> Any:
        kind, sizes = self.dtype, self.type.sizes
        if id(kind) not in known:
            return plain(self, other)
        if type(other) is tensor:
            if other.dtype is not kind:
                if id(kind) not in ints or id(other.dtype) not in ints:
                    return plain(self, other)
                kind = tl.int64
            value = other.handle.data
            if other.type is not self.type and (sizes := joined(sizes, other.type.sizes)) is None:
                return plain(self, other)
        elif (value := _constant(other, kind, compares)) is None:
            return plain(self, other)
        if compares:
            kind = tl.int1
        return tensor_of(compute(self.handle.data, value), kind, type_of(kind, sizes))

    setattr(core.tensor, name, operator)


def _shorten_offsets() -> None:
    """A pointer and an offset."""
    plain, tensor, known = core.tensor.__add__, core.tensor, frozenset(map(id, INTS))

    @functools.wraps(plain)
    def add(self: Any, other: Any) -> Any:
        kind, sizes = self.dtype, self.type.sizes
        if type(kind) is not core.pointer_type:
            return plain(self, other)
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
        if type(other) is int and other in INT32:
            offset = np.uint64(other * width % 2**64)
        elif type(other) is tensor and id(other.dtype) in known:
            offset, sizes = width * other.handle.data.astype(np.uint64), joined(sizes, other.type.sizes)
            if sizes is None:
                return plain(self, other)
        else:
            return plain(self, other)
        return tensor_of(self.handle.data + offset, self.handle.dtype, type_of(kind, sizes))

    core.tensor.__add__ = add


def _shorten_getitem() -> None:
    """`x[:, None]` and the like."""
    plain, whole = core.tensor.__getitem__, slice(None)

    @functools.wraps(plain)
    def getitem(self: Any, slices: Any) -> Any:
        sizes = self.type.sizes
        if type(slices) is not tuple or not sizes or len(slices) - slices.count(None) != len(sizes):
            return plain(self, slices)
        if not all(part is None or part == whole for part in slices):
            return plain(self, slices)
        data = self.handle.data[slices]
        return tensor_of(data, self.dtype, type_of(self.dtype, data.shape))

    core.tensor.__getitem__ = getitem


def _shorten_types() -> None:
    """Casts to the type at hand, and operands that have the same shape."""
    semantic, tensor = type(interpreter.interpreter_semantic), core.tensor
    cast, fit, to_tensor = semantic.cast, semantic.broadcast_impl_value, semantic.to_tensor
    unwrap, same = core._unwrap_if_constexpr, core.dtype.__eq__
    simple = frozenset((tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)))

    def short_cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, fp_downcast_rounding)

    def repeated(value: Any, sizes: tuple[int, ...]) -> Any:
        data = np.empty(sizes, value.handle.data.dtype)
        data[...] = value.handle.data
        return tensor_of(data, value.handle.dtype.scalar, type_of(value.dtype, sizes))

    def short_fit(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.sizes, rhs.type.sizes
        if left == right:
            return lhs, rhs
        if left and right:
            return fit(self, lhs, rhs)
        return (lhs, repeated(rhs, left)) if left else (repeated(lhs, right), rhs)

    def short_to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else to_tensor(self, x, check_type)

    def short_unwrap(o: Any) -> Any:
        return o if type(o) in simple else o.value if type(o) is core.constexpr else unwrap(o)

    semantic.cast, semantic.broadcast_impl_value, semantic.to_tensor = short_cast, short_fit, short_to_tensor
    core._unwrap_if_constexpr = short_unwrap
    core.dtype.__eq__ = lambda self, other: self is other or same(self, other)


def _shorten_memory() -> None:
    """Loads and stores of numbers where pointers, mask and values have one shape, and what is not loaded is zero."""
    load, store, tensor, pointer_type = tl.load, tl.store, core.tensor, core.pointer_type

    @functools.cache
    def filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        data = np.full(shape, value, dtype)
        data.flags.writeable = False
        return data

    def mask_of(pointer: Any, mask: Any) -> Any:
        """Return the mask's data, None if Triton has to fit it to the pointers."""
        if mask is None:
            return filled(pointer.handle.data.shape, True, bool)
        is_fit = type(mask) is tensor and mask.dtype is tl.int1 and mask.type.sizes == pointer.type.sizes
        return mask.handle.data if is_fit else None

    @functools.wraps(load)
    def short_load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        kind = pointer.dtype.element_ty if type(pointer.dtype) is pointer_type else None
        is_simple = not options and id(kind) in NUMBERS and (other is None or (mask is not None and _is_zero(other)))
        if not is_simple or (data := mask_of(pointer, mask)) is None:
            return load(pointer, mask, other, **options)
        dtype, places = interpreter._get_np_dtype(kind), pointer.handle.data
        found = _interpreter.load(places, data, filled(places.shape, 0, dtype), dtype)
        return tensor_of(found, kind, type_of(kind, pointer.type.sizes))

    @functools.wraps(store)
    def short_store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        kind = pointer.dtype.element_ty if type(pointer.dtype) is pointer_type else None
        is_simple = not options and id(kind) in NUMBERS and type(value) is tensor and value.dtype is kind
        is_simple = is_simple and value.type.sizes == pointer.type.sizes
        if not is_simple or (data := mask_of(pointer, mask)) is None:
            return store(pointer, value, mask, **options)
        _interpreter.store(pointer.handle.data, value.handle.data, data)

    tl.load = core.load = short_load
    tl.store = core.store = short_store


def _is_zero(value: Any) -> bool:
    """Return whether a constant is zero without a sign."""
    return type(value) in (int, float) and str(value) in ("0", "0.0")

"""A Hopper GPU, which need not be here, for kernels in Gluon: runs their source on the host, on torch's tensors.

Gluon has no interpreter. Where the hardware promises nothing, an inconvenient order is taken. Copies land in random
order while a partition waits or arrives, and other partitions may run before an arrival returns. Tiles that a product
reads must not change until it has been waited for. Layouts place the elements of tiles in shared memory as on the
device, so that two views of the same memory agree only where they do there. Kernels must not use `+=` and the like on
tensors, which Gluon would copy and torch changes in place.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.ops.gluon_partitions import Partitions


class Pointer:
    """Offsets in elements from the start of a tensor's memory."""

    def __init__(self, base: Tensor, offset: Any) -> None:
        self.base, self.offset = base, offset

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.base, self.offset + torch.as_tensor(by).long())

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.base, self.offset[key])

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.base.dtype)


def pointer(tensor: Tensor) -> Pointer:
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(flat, torch.tensor(tensor.storage_offset()))


class Layout:
    """A swizzled layout of the last two dims: panels of 128 bytes, whose rows lie one after the other."""

    def __init__(self, width: int, bits: int, rank: int = 2) -> None:
        self.columns, self.chunk = width * 8 // bits, 128 // bits

    def places(self, shape: Sequence[int]) -> Tensor:
        """Return the place of each element of a tile of `shape`, in elements."""
        rows, columns = math.prod(shape[:-1]), shape[-1]
        row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
        panel, within = column // self.columns, column % self.columns
        line = panel * rows + row  # of a panel's rows, which are `self.columns` elements each
        chunk, spot = within // self.chunk, within % self.chunk  # 16 bytes
        group = 8 * self.chunk // self.columns  # rows that fill 128 bytes
        chunk = chunk ^ (row // group % (self.columns // self.chunk))
        return (line * self.columns + chunk * self.chunk + spot).reshape(*shape)


class PlainLayout:
    """A layout whose elements lie one after the other."""

    def __init__(self, *parts: Any) -> None:
        pass

    def places(self, shape: Sequence[int]) -> Tensor:
        return torch.arange(math.prod(shape)).reshape(*shape)


class Tile:
    """A view of shared memory: the place of each element."""

    def __init__(self, memory: Tensor, places: Tensor, layout: Any) -> None:
        self.memory, self.places, self.layout = memory, places, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.places.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, i: Any) -> Tile:
        assert 0 <= int(i) < self.shape[0], "no such tile"
        return Tile(self.memory, self.places[int(i)], self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        return Tile(self.memory, self.places.narrow(dim, start, length), self.layout)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.memory, self.places.permute(*order), self.layout)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.memory, self.places.reshape(*shape), self.layout)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Layout) -> Tile:
        assert dtype == self.dtype and math.prod(shape) == self.places.numel() == self.memory.numel()
        return Tile(self.memory, stacked(shape, layout), layout)

    def load(self, layout: Any = None) -> Tensor:
        return self.memory[self.places]

    def store(self, value: Tensor) -> None:
        assert tuple(value.shape) == self.shape and value.dtype == self.dtype
        self.memory[self.places] = value


def stacked(shape: Sequence[int], layout: Layout | PlainLayout) -> Tensor:
    """Return the places of tiles `shape[1:]`, one after the other."""
    own = layout.places(shape[1:])
    return torch.arange(shape[0]).reshape(-1, *[1] * own.dim()) * own.numel() + own


class Barrier:
    """Flips its phase when all arrivals and bytes of the phase have come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        assert self.left >= count, "more arrivals than a phase has"
        self.left -= count
        self.flip()

    def flip(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.all), 1

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.all), "no such barrier"
        return self.all[int(i)]


class Program(Partitions):
    """One of `count` programs."""

    def __init__(self, number: int, count: int, seed: int) -> None:
        super().__init__(random.Random(seed))
        self.number, self.count = number, count
        self.is_fenced = True  # barriers that were initialised are visible to copies
        self.has_waited = False  # for earlier launches


class Running:
    """The program that runs."""

    program: Program


def load(at: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    assert Running.program.has_waited, "what earlier launches wrote is read before the wait for them"
    offset = torch.as_tensor(at.offset)
    mask, offset = torch.broadcast_tensors(torch.as_tensor(True if mask is None else mask), offset)
    assert (offset[mask] >= 0).all(), "an element before the tensor"
    found = torch.full(offset.shape, other, dtype=at.base.dtype)
    found[mask] = at.base[offset[mask]]
    return found


def store(at: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, value = torch.broadcast_tensors(torch.as_tensor(at.offset), value)
    mask = torch.ones(offset.shape, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, offset.shape)
    assert (offset[mask] >= 0).all(), "an element before the tensor"
    at.base[offset[mask]] = value[mask].to(at.base.dtype)


def allocate(dtype: Any, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Any:
    if isinstance(layout, Barriers):
        return Barriers(shape[0])
    memory = torch.full((math.prod(shape),), float("nan"), dtype=dtype)
    flat = len(shape) == 2 and not isinstance(layout, PlainLayout)
    tile = Tile(memory, layout.places(shape) if flat else stacked(shape, layout), layout)
    if value is not None:
        tile.store(value)
    return tile


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count
    Running.program.is_fenced = False


def fence() -> None:
    Running.program.is_fenced = True


def await_inputs(mode: Any) -> None:
    Running.program.has_waited = True


def arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    Running.program.pause()


def expect(barrier: Barrier, count: int, pred: Any = True) -> None:
    if pred:
        barrier.bytes += count
        arrive(barrier)


def wait(barrier: Barrier, phase: Any) -> None:
    """Wait until the phase of that parity is complete: the barrier is in the other one."""
    Running.program.wait(lambda: barrier.phase != int(phase))


def copy(described: Any, at: Sequence[Any], barrier: Barrier, tile: Tile, pred: Any = True) -> None:
    """Copy a box from `at` into a tile, some time later. Places outside the tensor give zeros."""
    if not pred:
        return
    assert Running.program.has_waited, "what earlier launches wrote is copied before the wait for them"
    box, at = described.block_shape, [int(x) for x in at]
    assert math.prod(box) == tile.places.numel(), "the tile has another size"

    def land() -> None:
        found = torch.zeros(box, dtype=tile.dtype)
        if min(at) >= 0:
            inside = described.whole[tuple(slice(x, x + n) for x, n in zip(at, box, strict=True))]
            found[tuple(slice(n) for n in inside.shape)] = inside
        tile.memory[tile.places] = found.reshape(tile.shape)
        barrier.bytes -= found.numel() * found.element_size()
        assert barrier.bytes >= 0, "more bytes than expected"
        barrier.flip()

    Running.program.copies.append(land)


def gather(tile: Tile, at: Pointer, mask: Any = None) -> None:
    """Copy the elements at the pointers into a tile, some time later. The tile gets NaN where the mask is False."""
    assert torch.as_tensor(at.offset).shape == tile.shape, "the tile has another size"
    running = Running.program.running

    def land() -> None:
        tile.memory[tile.places] = load(at, mask, float("nan"))
        running.copies.remove(land)

    running.copies.append(land)
    Running.program.copies.append(land)


def arrive_behind_copies(barrier: Barrier, increment_count: bool) -> None:
    """Let each thread of the partition arrive when the copies that it has begun so far have landed."""
    assert not increment_count
    running = Running.program.running
    begun = list(running.copies)

    def land() -> None:
        if any(copy in running.copies for copy in begun):
            Running.program.copies.append(land)
        else:
            barrier.arrive(running.num_threads)

    Running.program.copies.append(land)
    Running.program.pause()


def same_bytes(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors agree, NaN with the same NaN."""
    raw = ([x.contiguous().view(torch.uint8) for x in tensors] for tensors in (some, others))
    return all(map(torch.equal, *raw))


class Product:
    """A product that is computed when it is waited for. Its tiles must not change from its start until then."""

    def __init__(self, a: Any, b: Tile, total: Any, use_acc: bool) -> None:
        self.a, self.b, self.total, self.use_acc, self.value = a, b, total, use_acc, None
        self.operands = self._operands()

    def _operands(self) -> tuple[Tensor, Tensor]:
        return self.a.load() if isinstance(self.a, Tile) else self.a, self.b.load()

    def compute(self) -> None:
        assert same_bytes(self._operands(), self.operands), "memory changes while a product reads it"
        a, b = self.operands
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = a.double() @ b.double()
        self.value = (product + total.double() if self.use_acc else product).float()


def multiply(a: Any, b: Tile, total: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, total, use_acc)
    Running.program.running.products.append(product)
    return product


def finish(count: int, deps: Sequence[Any]) -> Any:
    while len(Running.program.running.products) > count:
        Running.program.running.products.pop(0).compute()
    found = tuple(x.value if isinstance(x, Product) else x for x in deps)
    assert all(x is not None for x in found), "a product is used that was not waited for"
    return found[0] if len(found) == 1 else found


def partitions(functions: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(functions) == len(warps) + 1 == len(registers) + 1
    assert Running.program.is_fenced, "no fence after the barriers"
    threads = [32 * count for count in (4, *warps)]
    Running.program.run([functools.partial(function, *args) for function, args in functions], threads)


def pairwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), a, b)


LANGUAGE: dict[str, Any] = {
    "NVMMASharedLayout": Layout,
    "static_range": range,
    "SwizzledSharedLayout": PlainLayout,
    "program_id": lambda axis: torch.tensor(Running.program.number, dtype=torch.int32),
    "num_programs": lambda axis: torch.tensor(Running.program.count, dtype=torch.int32),
    "load": load,
    "store": store,
    "allocate_shared_memory": allocate,
    "arange": lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "where": where,
    "maximum": pairwise(torch.maximum),
    "minimum": pairwise(torch.minimum),
    "abs": torch.abs,
    "exp2": torch.exp2,
    "max": lambda x, axis: x.amax(axis),
    "cdiv": lambda a, b: -(-a // b),
    "sum": lambda x, axis: x.sum(axis),
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "convert_layout": lambda x, layout: x,
    "exp": torch.exp,
    "warp_specialize": partitions,
    **dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"), lambda *parts: None
    ),
}
HARDWARE: dict[str, Any] = {
    "gl": types.SimpleNamespace(**LANGUAGE),
    "tl": types.SimpleNamespace(**LANGUAGE),
    "mbarrier": types.SimpleNamespace(
        init=init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=lambda: Barriers(0)
    ),
    "tma": types.SimpleNamespace(async_copy_global_to_shared=copy),
    "async_copy": types.SimpleNamespace(async_copy_global_to_shared=gather, mbarrier_arrive=arrive_behind_copies),
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": finish,
    "fence_async_shared": fence,
    "await_inputs": await_inputs,
}


class Described:
    """A tensor descriptor as kernels see it."""

    def __init__(self, given: Any) -> None:
        self.base, self.block_shape = given.base, given.block_shape
        self.whole = torch.as_strided(given.base, given.shape, given.strides)
        nbytes = math.prod(self.block_shape) * self.base.element_size()
        self.layout = Layout(128, 8 * self.base.element_size())
        self.block_type = types.SimpleNamespace(nbytes=nbytes, shape=self.block_shape)


def argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return pointer(value)
    return Described(value) if hasattr(value, "block_shape") else value


class HostKernel:
    """Stands in for a kernel: `kernel[(programs,)](..)` runs its programs one after the other."""

    def __init__(self, function: Callable[..., None], names: Sequence[str], seed: int) -> None:
        self.function, self.names, self.seed = function, names, seed
        self.num_programs = 0  # that ran

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = [argument(arg) for arg in args]
            known = {name: value for name, value in options.items() if name in self.names}
            for number in range(count := operator.index(grid[0])):
                Running.program = Program(number, count, self.seed + number)
                self.function(*given, **known)
                self.num_programs += 1

        return launch


def hosted(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a module, with kernels' functions as plain ones, and those of the hardware."""
    scope = {name: getattr(value, "value", value) for name, value in plain.items()} | HARDWARE
    for name, value in plain.items():
        if hasattr(value, "arg_names") and name not in HARDWARE:
            names = value.fn.__globals__
            own = scope if names["__name__"] == plain["__name__"] else hosted(names)
            scope[name] = types.FunctionType(value.fn.__code__, own, name, value.fn.__defaults__)
    return scope


@contextmanager
def on_host(module: Any, kernel: str, seed: int = 0) -> Iterator[HostKernel]:
    """Run the kernel of that name in `module` on the host, for the time of the block."""
    plain = dict(vars(module))
    scope = hosted(plain)
    stand_in = HostKernel(scope[kernel], plain[kernel].arg_names, seed)
    setattr(module, kernel, stand_in)
    try:
        yield stand_in
    finally:
        setattr(module, kernel, plain[kernel])

"""Runs lowered kernels on x86: MLIR 19 turns the IR into machine code, which is called for each program of a launch.

On-chip memory starts as NaN. With GUARD=right or left each buffer ends or begins at a page that nobody may touch, and
a launch runs in a child process; with MOST_GUARDED=n the first n alone of those with the same kernel, grid and shapes.
With ORDER=reverse the programs run from the last to the first.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.ascend.lowering import LAUNCHES, Lowered

ROOT = Path(__file__).parents[2] / ".ascend"
MLIR = Path(os.environ.get("FORKPOINT_MLIR", ROOT / "mlir" / "usr"))
BUILT = ROOT / "x86"
SUPPORT = Path(__file__).with_name("on_chip.c")
GUARD, ORDER = os.environ.get("GUARD", ""), os.environ.get("ORDER", "")
MOST_GUARDED = int(os.environ.get("MOST_GUARDED", 1 << 30))
PAGE = 4096
GAP = 64 * PAGE  # untouchable bytes on either side
PASSES = (  # to linear algebra on plain buffers, to loops, to LLVM
    "--allow-unregistered-dialect",
    "--inline",
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--canonicalize",
    "--finalizing-bufferize",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--llvm-request-c-wrappers",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


class Memref(ctypes.Structure):
    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@dataclass
class Fault:
    """A launch that touched memory outside its buffers."""

    kernel: str
    where: str
    test: str


@dataclass
class Ran:
    """The launches of this process, and their faults."""

    launches: Counter[str] = field(default_factory=Counter)
    guarded: Counter[Any] = field(default_factory=Counter)  # by kernel, grid and shapes
    faults: list[Fault] = field(default_factory=list)
    test: str = ""


RAN = Ran()


def plain_mlir(text: str) -> str:
    """Return the IR without Ascend's own operations."""
    constants = dict(re.findall(r"(%[\w#]+) = arith\.constant (-?\d+) : i32", text))
    constants |= dict(re.findall(r"(%\w+) = arith\.constant (true|false)", text))
    sums = {m[1]: m for m in re.finditer(r"call @(triton_cumsum_\d+)\(%[\w#]+, (%\w+), (%\w+)\)", text)}
    out: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith(("annotation.mark", "gpu.barrier")):
            continue
        cast = re.match(r"\s*(%\w+) = hivm\.hir\.pointer_cast\((%\w+)\) \[(%\w+)\] : memref<\?x(\w+)>", line)
        declared = re.match(r"\s*func\.func private @(\w+)\(tensor<([\dx]+)x(\w+)>, i32, i1\)", line)
        if cast:
            out += _pointer_cast(*cast.groups(), place=len(out))
        elif declared:
            axis, backwards = (constants[name] for name in sums[declared[1]].groups()[1:])
            sizes = [int(size) for size in declared[2].split("x")]
            out += _cumsum(declared[1], sizes, declared[3], int(axis), backwards == "true")
        else:
            assert "func.func private" not in line, f"a call that x86 has no form of: {line.strip()}"
            line = line.replace("SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, ", "")
            out.append(line.replace("func.func @", "func.func @K_"))
    return "\n".join(out)


def _pointer_cast(result: str, address: str, size: str, kind: str, place: int) -> list[str]:
    """Return the lines of a buffer at an address, in LLVM's operations."""
    struct, p = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>", f"%cast{place}"
    return [
        f"{p}p = llvm.inttoptr {address} : i64 to !llvm.ptr",
        f"{p}a = llvm.mlir.undef : {struct}",
        f"{p}b = llvm.insertvalue {p}p, {p}a[0] : {struct}",
        f"{p}c = llvm.insertvalue {p}p, {p}b[1] : {struct}",
        f"{p}z = llvm.mlir.constant(0 : i64) : i64",
        f"{p}o = llvm.mlir.constant(1 : i64) : i64",
        f"{p}d = llvm.insertvalue {p}z, {p}c[2] : {struct}",
        f"{p}s = arith.index_cast {size} : index to i64",
        f"{p}e = llvm.insertvalue {p}s, {p}d[3, 0] : {struct}",
        f"{p}f = llvm.insertvalue {p}o, {p}e[4, 0] : {struct}",
        f"{result} = builtin.unrealized_conversion_cast {p}f : {struct} to memref<?x{kind}>",
    ]


def _cumsum(name: str, sizes: Sequence[int], kind: str, axis: int, backwards: bool) -> list[str]:
    """Return a function of running sums along an axis, one element after another."""
    tensor = f"tensor<{'x'.join(map(str, sizes))}x{kind}>"
    real = kind[0] in "fb"
    lines = [
        f"func.func private @{name}(%x: {tensor}, %axis: i32, %back: i1) -> {tensor} {{",
        "%c0 = arith.constant 0 : index",
        "%c1 = arith.constant 1 : index",
        *(f"%n{i} = arith.constant {size} : index" for i, size in enumerate(sizes)),
        f"%zero = arith.constant 0{'.0' if real else ''} : {kind}",
        f"%empty = tensor.empty() : {tensor}",
    ]
    kept, others = "%empty", [i for i in range(len(sizes)) if i != axis]
    for i in others:
        lines.append(f"%r{i} = scf.for %i{i} = %c0 to %n{i} step %c1 iter_args(%t{i} = {kept}) -> ({tensor}) {{")
        kept = f"%t{i}"
    loop = f"scf.for %j = %c0 to %n{axis} step %c1 iter_args(%ta = {kept}, %acc = %zero) -> ({tensor}, {kind}) {{"
    lines += [f"%ra:2 = {loop}", f"%m = arith.subi %n{axis}, %c1 : index", "%b = arith.subi %m, %j : index"]
    at = ", ".join(("%b" if backwards else "%j") if i == axis else f"%i{i}" for i in range(len(sizes)))
    lines += [
        f"%v = tensor.extract %x[{at}] : {tensor}",
        f"%s = arith.add{'f' if real else 'i'} %acc, %v : {kind}",
        f"%w = tensor.insert %s into %ta[{at}] : {tensor}",
        f"scf.yield %w, %s : {tensor}, {kind}",
        "}",
    ]
    last = "%ra#0"
    for i in reversed(others):
        lines += [f"scf.yield {last} : {tensor}", "}"]
        last = f"%r{i}"
    return [*lines, f"return {last} : {tensor}", "}"]


def _tool(name: str, *args: object, given: str = "") -> str:
    paths = f"{MLIR}/lib/x86_64-linux-gnu:{MLIR}/lib/llvm-19/lib"
    command = [str(MLIR / "lib/llvm-19/bin" / name), *map(str, args)]
    env = {**os.environ, "LD_LIBRARY_PATH": paths}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{name}: {done.stderr[:2000]}"
    return done.stdout


def mlir_opt(*passes: str, given: str) -> str:
    return _tool("mlir-opt", *passes, given=given)


def _compiled(lowered: Lowered) -> Path:
    text = plain_mlir(lowered.linalg)
    key = hashlib.sha256((text + SUPPORT.read_text() + " ".join(PASSES)).encode()).hexdigest()[:20]
    BUILT.mkdir(parents=True, exist_ok=True)
    library = BUILT / f"{lowered.name}_{key}.so"
    if not library.exists():
        own = BUILT / f"{lowered.name}_{key}_{os.getpid()}"
        code = _tool("mlir-translate", "--mlir-to-llvmir", given=_tool("mlir-opt", *PASSES, given=text))
        code = re.sub(r"@(malloc|free)\b", r"@chip_\1", code)
        code = _tool("opt", "-O2", "-S", given=code)
        target = ("-O2", "-relocation-model=pic", "-filetype=obj", "-mcpu=x86-64-v3")
        _tool("llc", *target, "-o", f"{own}.o", given=code)
        command = ["gcc", "-O2", "-fPIC", "-shared", str(SUPPORT), f"{own}.o", "-lm", "-o", f"{own}.so"]
        subprocess.run(command, check=True)
        Path(f"{own}.o").unlink()
        Path(f"{own}.so").rename(library)
    return library


class Kernel:
    """A lowered kernel as machine code."""

    def __init__(self, lowered: Lowered) -> None:
        head = re.search(r"func\.func @(\w+)\((.*?)\) attributes", lowered.linalg, re.S)
        assert head is not None
        self._types = re.findall(r"%arg\d+: (memref<\?x\w+>|\w+)", head[2])
        self.library = ctypes.CDLL(str(_compiled(lowered)))
        self._run = getattr(self.library, f"_mlir_ciface_K_{head[1]}")
        self._run.restype = None
        self._spare = ctypes.create_string_buffer(1 << 16)  # the lock and the workspace that IR of Ascend is given

    def __call__(self, values: Sequence[int | float], grid: tuple[int, int, int], programs: Iterable[int]) -> None:
        """`values` are addresses and numbers."""
        assert len(values) == len(self._types) - 8, "two hidden arguments before, and the grid's six behind"
        spare = ctypes.addressof(self._spare)
        kept, args = list[Any](), list[Any]()
        for kind, value in zip(self._types, [spare, spare, *values], strict=False):
            if kind.startswith("memref"):
                kept.append(Memref(value, value, 0, 1 << 62, 1))
                args.append(ctypes.byref(kept[-1]))
            else:
                args.append(SCALARS[kind](value))
        sizes = [ctypes.c_int32(size) for size in grid]
        for program in programs:
            place = (program % grid[0], program // grid[0] % grid[1], program // (grid[0] * grid[1]))
            self._run(*args, *sizes, *(ctypes.c_int32(at) for at in place))
            self.library.chip_clear()


@cache
def _kernel(linalg: str, name: str) -> Kernel:
    return Kernel(Lowered(name, "", linalg, ""))


def run(lowered: Lowered, given: list[tuple[str, Any]], grid: tuple[int, int, int]) -> None:
    """Run a launch on tensors of the host or of the fake NPU."""
    RAN.launches[lowered.name] += 1
    kernel = _kernel(lowered.linalg, lowered.name)
    total = grid[0] * grid[1] * grid[2]
    programs = range(total - 1, -1, -1) if ORDER == "reverse" else range(total)
    alike = lowered.name, lowered.linalg, grid, tuple(v.shape for _, v in given if isinstance(v, Tensor))
    if GUARD and RAN.guarded[alike] < MOST_GUARDED:
        RAN.guarded[alike] += 1
        _run_guarded(kernel, lowered.name, given, grid, programs)
    else:
        kernel([v.data_ptr() if isinstance(v, Tensor) else v for _, v in given], grid, programs)


class _Guarded:
    """A buffer's bytes between pages that nobody may touch, shared with children."""

    def __init__(self, libc: Any, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes, self._libc = name, num_bytes, libc
        self._room = -(-num_bytes // PAGE) * PAGE
        self._total = self._room + 2 * GAP
        self._base = libc.mmap(None, self._total, 0, 0x21, -1, 0)  # no access; shared, anonymous
        assert libc.mprotect(self._base + GAP, self._room, 3) == 0
        self.start = self._base + GAP + (self._room - num_bytes if GUARD == "right" else 0)

    def says(self, address: int) -> str:
        inside = self._base <= address < self._base + self._total
        return f"{self.name}: byte {address - self.start} of {self.num_bytes}" if inside else ""

    def close(self) -> None:
        self._libc.munmap(ctypes.c_void_p(self._base), self._total)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes, libc.munmap.argtypes = [pointer, size, ctypes.c_int], [pointer, size]
    return libc


def _run_guarded(
    kernel: Kernel, name: str, given: list[tuple[str, Any]], grid: tuple[int, int, int], programs: Iterable[int]
) -> None:
    """Run a launch in a child process, and copy its memory back. If it fails, note a fault and run it unguarded."""
    libc, regions, values = _libc(), dict[int, tuple[_Guarded, Any]](), list[Any]()
    pools = list[tuple[_Guarded, int]]()
    for argument, value in given:
        if argument == "pools":
            value, pools = _guarded_pools(libc, dict(given))
        if not isinstance(value, Tensor):
            values.append(value)
            continue
        storage = value.untyped_storage()
        if storage.data_ptr() not in regions:
            region = _Guarded(libc, argument, max(1, storage.nbytes()))
            ctypes.memmove(region.start, storage.data_ptr(), storage.nbytes())
            regions[storage.data_ptr()] = region, storage
        values.append(regions[storage.data_ptr()][0].start + value.data_ptr() - storage.data_ptr())
    told = _Guarded(libc, "told", 8)
    child = os.fork()
    if child == 0:
        gc.disable()  # what it would take down may wait for threads, which a child does not have
        kernel.library.chip_watch(ctypes.c_void_p(told.start))
        kernel(values, grid, programs)
        os._exit(0)
    failed = os.waitpid(child, 0)[1] != 0
    if failed:
        address = ctypes.c_int64.from_address(told.start).value
        where = "".join(region.says(address) for region, _ in [*regions.values(), *pools]) or hex(address)
        RAN.faults.append(Fault(name, where, RAN.test))
        kernel([v.data_ptr() if isinstance(v, Tensor) else v for _, v in given], grid, programs)
    for region, storage in regions.values():
        if not failed:
            ctypes.memmove(storage.data_ptr(), region.start, storage.nbytes())
        region.close()
    for region, address in pools:
        if not failed:
            ctypes.memmove(address, region.start, region.num_bytes)
        region.close()
    told.close()


def _guarded_pools(libc: Any, given: dict[str, Any]) -> tuple[Tensor, list[tuple[_Guarded, int]]]:
    """Return the table of a launch that copies states, with guarded copies of its pools up to the last slot in use, and
    the address of each pool."""
    table, last = given["pools"].clone(), int(max(given["src"].max(), given["dst"].max()))
    pools = []
    for line, (address, stride, size) in enumerate(table.tolist()):
        region = _Guarded(libc, f"pool {line}", stride * last + size)
        ctypes.memmove(region.start, address, region.num_bytes)
        table[line, 0] = region.start
        pools.append((region, address))
    return table, pools


LAUNCHES.run = run

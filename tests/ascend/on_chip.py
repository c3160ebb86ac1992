"""A rough estimate of the on-chip memory of a program: the buffers of a lowered kernel that live at the same time.

MLIR 19 fuses elementwise operations and gives each tensor of the IR a buffer. A buffer lives from its creation to its
last use, or to the end of the loop around that use. The estimate ignores the memory of the matrix units and the double
buffering of Huawei's compiler.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict

from tests.ascend.execution import mlir_opt, plain_mlir
from tests.ascend.lowering import Lowered

SIZES = {"i1": 1, "i8": 1, "i16": 2, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "index": 8}
CLEAN = ("--canonicalize", "--cse")
PASSES = (
    "--allow-unregistered-dialect",
    "--inline",
    *CLEAN,
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--linalg-fuse-elementwise-ops",
    *CLEAN,
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    *CLEAN,
    "--finalizing-bufferize",
    *CLEAN,
)
NAME = re.compile(r"%[\w#]+")
SAME = re.compile(r"= (memref\.(subview|cast|reinterpret_cast|expand_shape|collapse_shape|reshape)|arith\.select) ")


class _Names:
    """Maps names of the same buffer to one name."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def of(self, name: str) -> str:
        while name in self._first:
            name = self._first[name]
        return name

    def join(self, one: str, other: str) -> None:
        one, other = self.of(one), self.of(other)
        if one != other:
            self._first[one] = other


def _num_bytes(kind: str) -> int:
    """Return the bytes of a `memref<4x8xf32..>`; 0 for one of unknown size, which is part of another."""
    *sizes, element = kind.removeprefix("memref<").split(",")[0].rstrip(">").split("x")
    return 0 if "?" in sizes else math.prod(map(int, sizes)) * SIZES[element]


def on_chip_bytes(lowered: Lowered) -> int:
    """Return the largest number of bytes that live at the same time."""
    names, uses, loops = _Names(), defaultdict[str, list[int]](list), list[tuple[int, int]]()
    made: dict[str, tuple[int, int]] = {}
    regions: list[tuple[int, list[str], bool]] = []  # first line, results, whether it is run again
    closed: list[str] = []
    for at, line in enumerate(mlir_opt(*PASSES, given=plain_mlir(lowered.linalg)).splitlines()):
        line = line.strip()
        if line.startswith("}"):
            start, closed, again = regions.pop()
            loops += [(start, at)] if again else []
        found = NAME.findall(line)
        for name in found:
            uses[name].append(at)
        head = re.match(r"(%\w+)(?::(\d+))? = ", line)
        if head and (kind := re.search(r"= memref\.alloca?\(.*: (memref<\S*)", line)):
            made[head[1]] = at, _num_bytes(kind[1])
        elif head and SAME.search(line) and "memref" in line:
            for name in found[1:]:
                names.join(head[1], name)
        elif line.startswith("scf.yield"):
            for result, name in zip(regions[-1][1], found, strict=False):
                names.join(result, name)
        if line.endswith("{"):
            results = [] if not head else [f"{head[1]}#{i}" for i in range(int(head[2]))] if head[2] else [head[1]]
            results = closed if line.startswith("}") else results
            carried = re.findall(r"(%[\w#]+) = (%[\w#]+)", line.partition("iter_args")[2])
            for i, (inner, outer) in enumerate(carried):
                names.join(inner, outer)
                if i < len(results):
                    names.join(results[i], inner)
            regions.append((at, results, "scf.for" in line or "scf.while" in line))
    last: dict[str, int] = defaultdict(int)
    for name, places in uses.items():
        last[names.of(name)] = max(last[names.of(name)], places[-1])
    lives = []
    for name, (start, size) in made.items():
        end = last[names.of(name)]
        lives.append((start, max([end] + [b for a, b in loops if start < a <= end <= b]), size))
    return max((sum(size for a, b, size in lives if a <= at <= b) for at, _, _ in lives), default=0)

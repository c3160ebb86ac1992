"""A Hopper GPU, which need not be here, for kernels of one warp: what the compiler made of them is run on the host.

The interpreter of Triton rounds each product. The compiler fuses products with sums, of two in `a * b + c * d` one, and
adds up rows in the order of its lanes; whether two kernels have the same bits is in their PTX. What that leaves to the
assembler, a product that is only added to something, is refused. Functions that a GPU has approximations of are exact.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]
LANE, EVERYWHERE = np.arange(32), np.full(32, True)
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
NOTHING = ("bar", "cp.async.wait_group", "cp.async.commit_group", "griddepcontrol", "fence")


class _Host:
    """All memory of the process, byte by byte."""

    __array_interface__ = {"data": (1, False), "shape": (1 << 47,), "typestr": "|u1", "version": 3}  # noqa: RUF012


HOST = np.asarray(_Host())
ALONE: dict[str, Callable[[Lanes], Any]] = {
    "ex2": np.exp2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": np.negative,
    "not": np.invert,
    "mov": lambda x: x,
}
PAIRS: dict[str, Callable[[Lanes, Lanes], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda x, by: np.where(by < 8 * x.itemsize, x << by.astype(x.dtype), 0),
    "shr": lambda x, by: x >> np.minimum(by, 8 * x.itemsize - 1).astype(x.dtype),
}


@functools.cache
def kind(name: str) -> np.dtype[Any]:
    """What `f32`, `b64` or `bf16` is on the host."""
    if name == "pred":
        return np.dtype(bool)
    letter, size = ("u", "16") if name == "bf16" else (name[0], name[1:])
    return np.dtype(f"{letter.translate({ord('b'): 'u', ord('s'): 'i'})}{int(size) // 8}")


@functools.cache
def number(text: str, of: np.dtype[Any]) -> Lanes:
    """The same in all lanes."""
    if text.startswith("0f"):
        return np.full(32, int(text[2:], 16), np.uint32).view(of)
    value = int(text.rstrip("U"), 0)
    return np.full(32, value != 0) if of.kind == "b" else np.full(32, value & (1 << 8 * of.itemsize) - 1).astype(of)


def rounded(x: Lanes) -> Lanes:
    """fp32 to the nearest bfloat16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Warp:
    """One program: registers, shared memory, and where it is in the grid. Lanes branch alike."""

    def __init__(self, arguments: list[int], program: int) -> None:
        self.arguments, self.registers = arguments, defaultdict[str, Lanes](lambda: np.zeros(32, np.uint64))
        self.shared, self.special = np.zeros(1 << 16, np.uint8), {"%tid.x": LANE, "%ctaid.x": 0 * LANE + program}

    def read(self, text: str, of: np.dtype[Any]) -> Lanes:
        text = text.strip()
        if text in self.special:
            return self.special[text].astype(of)
        if not text.startswith("%"):
            return number("0" if text == "global_smem" else text, of)
        bits = self.registers[text]
        return bits.view(of) if bits.itemsize == of.itemsize else bits.astype(np.uint64).astype(of)

    def write(self, text: str, value: Lanes, here: Lanes) -> None:
        bits = value.view(np.uint32) if value.dtype == np.float32 else value
        old = None if here is EVERYWHERE else self.registers.get(text)
        self.registers[text] = bits if old is None else np.where(here, bits, old.view(bits.dtype))

    def place(self, text: str, there: str) -> tuple[Lanes, Lanes]:
        """(memory, addresses in it) of `[%rd1 + 4]`."""
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        memory, first = (self.shared, 0) if there == "shared" else (HOST, 1)
        address = self.read(base, np.dtype(np.uint64 if memory is HOST else np.uint32)).astype(np.int64)
        return memory, address + int(offset or 0) - first


def load(warp: Warp, parts: list[str], operands: list[str], here: Lanes) -> None:
    of, names = kind(parts[-1]), operands[0].strip("{} ").split(", ")
    if parts[1] == "param":
        value = warp.arguments[int(re.findall(r"_param_(\d+)", operands[1])[0])]
        warp.write(names[0], np.full(32, value & (1 << 8 * of.itemsize) - 1, f"u{of.itemsize}"), here)
        return
    memory, at = warp.place(operands[1], parts[1])
    at = np.where(here, at, at[here.argmax()]) if here.any() else at
    for i, name in enumerate(names) if here.any() else ():
        found = memory[(at + i * of.itemsize)[:, None] + np.arange(of.itemsize)]
        warp.write(name.strip(), found.view(of)[:, 0], here)


def store(warp: Warp, parts: list[str], operands: list[str], here: Lanes) -> None:
    of, (memory, at) = kind(parts[-1]), warp.place(operands[0], parts[1])
    for i, name in enumerate(operands[1].strip("{} ").split(", ")):
        value = np.ascontiguousarray(warp.read(name, of)[here]).view(np.uint8).reshape(-1, of.itemsize)
        memory[(at[here] + i * of.itemsize)[:, None] + np.arange(of.itemsize)] = value


def copy(warp: Warp, operands: list[str], here: Lanes) -> None:
    """`cp.async`, done at once; of what there is no source, zeros."""
    (shared, target), (host, source) = warp.place(operands[0], "shared"), warp.place(operands[1], "global")
    size = int(operands[2], 0)
    present = warp.read(operands[3], np.dtype(np.uint32)) if len(operands) > 3 else np.full(32, size)
    for lane in np.flatnonzero(here):
        own = host[source[lane] : source[lane] + present[lane]]
        shared[target[lane] : target[lane] + size] = np.pad(own, (0, size - len(own)))


def matrices(warp: Warp, parts: list[str], operands: list[str], here: Lanes) -> None:
    """`ldmatrix` and `stmatrix` of 8 x 8 values of two bytes, of which lane i has two of row i / 4, or of column."""
    stores, (first, second) = parts[0] == "stmatrix", (LANE // 4, 2 * (LANE % 4))
    memory, at = warp.place(operands[not stores], "shared")
    for i, name in enumerate(operands[stores].strip("{} ").split(", ")):
        pairs = [(second + j, first) if "trans" in parts else (first, second + j) for j in range(2)]
        mine = np.stack([at[8 * i + row] + 2 * column + byte for row, column in pairs for byte in range(2)], axis=1)
        if stores:
            memory[mine] = warp.read(name, np.dtype(np.uint32)).view(np.uint8).reshape(32, 4)
        else:
            warp.write(name, memory[mine].view(np.uint32)[:, 0], here)


def exchanged(warp: Warp, mode: str, operands: list[str]) -> Lanes:
    own, by = (warp.read(text, np.dtype(np.uint32)) for text in operands[1:3])
    lane = {"bfly": LANE ^ by, "idx": by & 31, "up": LANE - by.astype(np.int64)}[mode].astype(np.int64)
    return own[np.where(lane < 0, LANE, lane)]


def converted(warp: Warp, parts: list[str], operands: list[str]) -> Lanes:
    to, (own, *more) = parts[-2], [warp.read(text, kind(parts[-1])) for text in operands[1:]]
    if to == "bf16x2":
        return rounded(own).astype(np.uint32) << 16 | rounded(more[0])
    if to == "bf16":
        return rounded(own)
    return (own.astype(np.uint32) << 16).view(np.float32) if parts[-1] == "bf16" else own.astype(kind(to))


def permuted(a: Lanes, b: Lanes, choice: Lanes) -> Lanes:
    both = np.concatenate([x.view(np.uint8).reshape(32, 4) for x in (a, b)], axis=1)
    picks = choice[:, None] >> 4 * np.arange(4, dtype=np.uint32) & 15
    return np.take_along_axis(both, picks.astype(np.int64) & 7, axis=1).view(np.uint32)[:, 0]


def result(warp: Warp, parts: list[str], operands: list[str]) -> Lanes:
    """Return the result of an instruction that neither branches nor touches memory."""
    name, of = parts[0], kind(parts[-1]) if parts[-1] != "f32" else np.dtype(np.float32)

    def given(*kinds: Any) -> list[Lanes]:
        return [warp.read(text, np.dtype(each)) for text, each in zip(operands[1:], kinds, strict=True)]

    if name == "cvt":
        return converted(warp, parts, operands)
    if name == "shfl":
        return exchanged(warp, parts[2], operands)
    if name == "mov" and operands[1].startswith("{"):
        halves = [warp.read(text, kind(f"b{4 * of.itemsize}")) for text in operands[1].strip("{} ").split(", ")]
        return np.stack(halves, axis=1).view(of)[:, 0]
    if name == "setp":
        compare: Callable[..., Lanes] = getattr(operator, parts[1])
        return compare(*given(of, of))
    if name == "selp":
        a, b, chosen = given(of, of, bool)
        return np.where(chosen, a, b)
    if name == "prmt":
        return permuted(*given(of, of, of))
    if name == "bfe":
        x, first, count = (value.astype(np.int64) for value in given(of, np.uint32, np.uint32))
        found = x >> first & (1 << count) - 1
        return (found - (found >> count - 1 << count) if of.kind == "i" else found).astype(of)
    if name == "fma":  # twice rounded one time in 2^29, wherever it stands
        a, b, c = (value.astype(np.float64) for value in given(of, of, of))
        return (a * b + c).astype(of)
    if name in ("mul", "mad") and parts[1] in ("lo", "wide", "hi"):
        wide = np.dtype(f"{of.kind}{2 * of.itemsize}") if parts[1] != "lo" else of
        a, b, *added = given(of, of, *[wide] * (name == "mad"))
        product = a.astype(wide) * b.astype(wide)
        return (product >> 8 * of.itemsize).astype(of) if parts[1] == "hi" else product + added[0] if added else product
    if name in ("shl", "shr"):
        return np.asarray(PAIRS[name](*given(of, np.uint32))).astype(of)
    if parts[-1] == "bf16":
        assert name == "add", f"{'.'.join(parts)} is not known"
        a, b = ((value.astype(np.uint32) << 16).view(np.float32) for value in given(of, of))
        return rounded(a + b)
    if name in ALONE:
        return np.asarray(ALONE[name](*given(of)))
    assert name in PAIRS, f"{'.'.join(parts)} is not known"
    return np.asarray(PAIRS[name](*given(of, of)))


def check_sums(lines: list[tuple[str, list[str]]]) -> None:
    """No product is left that the assembler may fuse with a sum behind it, or not."""
    made = defaultdict[str, set[str]](set)
    for name, operands in lines:
        if operands and re.match(r"(mul|mov|neg\.f32|abs\.f32)\b", name):
            made[operands[0]] |= {name} if name == "mul.f32" else {text for text in operands[1:] if text[0] == "%"}
    for name, operands in lines:
        if re.match(r"(add|sub)\.f32", name):
            reached, seen = list(operands[1:]), set[str]()
            while reached:
                text = reached.pop()
                assert text != "mul.f32", f"{name} {operands}: the assembler may round a product before it, or not"
                reached += made[text] - seen
                seen |= made[text]


@np.errstate(all="ignore")
def run(ptx: str, arguments: list[int], num_programs: int) -> None:
    """All programs of a launch, one after another; `arguments` are the bits of its parameters."""
    lines, labels = list[tuple[str, str, str, list[str], list[str]]](), dict[str, int]()
    for text in ptx[ptx.index(".entry") :].splitlines():
        text = text.split("//")[0].strip()
        if text.startswith("$") and text.endswith(":"):
            labels[text[:-1]] = len(lines)
        elif found := INSTRUCTION.fullmatch(text):
            negated, guard, name, rest = found.groups()
            if not name.startswith(NOTHING):
                lines.append((negated, guard, name, name.split("."), OPERAND.findall(rest)))
    check_sums([(name, operands) for _, _, name, _, operands in lines])
    for program in range(num_programs):
        warp, at = Warp(arguments, program), 0
        while at < len(lines):
            negated, guard, name, parts, operands = lines[at]
            at += 1
            here = EVERYWHERE if not guard else warp.read(guard, np.dtype(bool)) ^ bool(negated)
            if parts[0] in ("bra", "ret"):
                assert here.all() or not here.any(), "lanes part"
                if here.all():
                    at = labels[operands[-1]] if parts[0] == "bra" else len(lines)
            elif parts[0] == "ld":
                load(warp, parts, operands, here)
            elif parts[0] == "st":
                store(warp, parts, operands, here)
            elif name.startswith("cp.async"):
                copy(warp, operands, here)
            elif "matrix" in parts[0]:
                matrices(warp, parts, operands, here)
            elif operands[0].startswith("{"):  # a register taken apart
                halves, of = operands[0].strip("{} ").split(", "), kind(parts[-1])
                whole = warp.read(operands[1], of).copy().view(f"u{of.itemsize // 2}").reshape(32, 2)
                for i, half in enumerate(halves):
                    warp.write(half.strip(), whole[:, i].copy(), here)
            else:
                warp.write(operands[0].split("|")[0], result(warp, parts, operands), here)

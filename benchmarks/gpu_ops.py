"""Times the Triton kernels, but attention, on the shapes of the 9B model: `python -m benchmarks.gpu_ops`.

Each line gives the median time of a call inside a CUDA graph, the floor (bytes over the measured copy rate, or
operations over the measured bfloat16 matrix rate, whichever is more) and what share of that ceiling is reached. States
and what attention reads come from memory: calls take turns over more of them than the cache holds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from benchmarks.indices import segment_index
from benchmarks.machine import commit_hash, today
from forkpoint.ops.metadata import DecodeIndex, RecordIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, RecurrenceParams
from forkpoint.ops.select import select_table

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
OPS = select_table("triton", False, False)
SHAPE = Recurrence(16, 32, 128, 128)
HIDDEN, INNER, HEADS, KV_HEADS, DIM, ROTARY, WIDTH, LAYERS = 4096, 12288, 16, 4, 256, 64, 4, 24
SLOT = SHAPE.num_v_heads * SHAPE.key_dim * SHAPE.value_dim * 4  # bytes of a layer's matrix state
CACHED = 256 << 20  # bytes over which calls take turns: several times the cache
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size. `make` returns calls that do the same work on different memory."""

    name: str
    num_bytes: float
    flops: float
    make: Callable[[], list[Call]]


def median_seconds(calls: list[Call], least: int = 16) -> float:
    """Return the median seconds of one call. All calls are recorded in one graph, repeated until it holds `least`
    calls."""
    for call in calls:
        call()
    calls = calls * -(-least // len(calls))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took: float = triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")
    return took / 1e3 / len(calls)


def ceilings() -> tuple[float, float]:
    """Return (bytes per second that a copy reads and writes, bfloat16 operations per second of a matrix product)."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    a, b = randn(8192, 8192), randn(8192, 8192)
    # Not in a graph: there a copy goes to the copy engines, which are slower.
    copied, multiplied = (
        triton.testing.do_bench(call, warmup=200, rep=300, return_mode="median") / 1e3
        for call in (lambda: target.copy_(source), lambda: a @ b)
    )
    return 2 * source.nbytes / copied, 2 * 8192**3 / multiplied


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def recurrence_params() -> RecurrenceParams:
    heads = SHAPE.num_v_heads
    return RecurrenceParams(SHAPE, torch.rand(heads, device=DEVICE) * -3, torch.rand(heads, device=DEVICE) - 2)


def segments(lens: list[int]) -> SegmentIndex:
    return segment_index(lens, range(len(lens)), range(len(lens)), device=DEVICE)


def turns(num_bytes: float) -> int:
    return max(1, min(64, round(CACHED / num_bytes)))


def decode_cases() -> Iterator[Case]:
    for batch in (1, 8, 32, 128, 256):
        for moves in (False, True):

            def make(batch: int = batch, moves: bool = moves) -> list[Call]:
                count = turns(batch * SLOT)
                pool = torch.randn(2 * count * batch, SHAPE.num_v_heads, SHAPE.value_dim, SHAPE.key_dim, device=DEVICE)
                mixed, params = randn(batch, SHAPE.mixed_dim), recurrence_params()
                a, b = randn(batch, SHAPE.num_v_heads), randn(batch, SHAPE.num_v_heads)
                starts = [2 * i * batch for i in range(count)]
                rows = [list(range(start, start + batch)) for start in starts]
                slots = [DecodeIndex(ints(row), ints([s + batch * moves for s in row])) for row in rows]
                given = RecurrenceInputs(mixed, a, b)
                return [lambda i=i: OPS.recurrence_decode(given, params, pool, i) for i in slots]  # type: ignore[misc]

            name = f"recurrence_decode, {batch} rows" + (", to other slots" if moves else "")
            yield Case(name, 2 * batch * SLOT, 0, make)


def record_cases() -> Iterator[Case]:
    """Yield rows whose states are written every 8 tokens, at every distance from the last write. All tokens of their
    windows except one were accepted."""
    interval, heads, shapes = 8, SHAPE.num_v_heads, record_shapes()
    record = 4 * math.prod(shapes[0]) + 2 * math.prod(shapes[1])
    for batch in (1, 8, 32, 128, 256):
        for tokens in (1, 2, 4):

            def make(batch: int = batch, tokens: int = tokens) -> list[Call]:
                count, total = max(turns(batch * SLOT), -(-interval // batch)), batch * tokens
                pool = torch.randn(count * batch, heads, SHAPE.value_dim, SHAPE.key_dim, device=DEVICE)
                mixed, a, b = (randn(total, size) for size in (SHAPE.mixed_dim, heads, heads))
                params, lines = recurrence_params(), (batch, interval + 2 * tokens - 1)
                updates = torch.zeros(batch, interval + tokens - 1, *shapes[0], device=DEVICE)
                sizes = ((SHAPE.num_k_heads,), (heads,))
                kept = [updates, randn(*lines, *shapes[1]), *(torch.zeros(*lines, *x, device=DEVICE) for x in sizes)]
                calls: list[Call] = []
                for i in range(count):
                    ends = [64 + (3 * row + i) % interval for row in range(batch)]
                    written = [(end - max(1, tokens - 1)) // interval * interval for end in ends]
                    held = [end - start for end, start in zip(ends, written, strict=True)]
                    slots = list(range(i * batch, (i + 1) * batch))
                    offsets, rows = list(range(0, total + 1, tokens)), list(range(batch))
                    columns = (slots, slots, offsets, rows, written, held, [0] * batch, [-1] * batch)
                    index = RecordIndex(interval, *(ints(column) for column in columns))
                    calls.append(
                        lambda index=index: OPS.recurrence_record(
                            RecurrenceInputs(mixed, a, b), params, pool, index, kept
                        )  # type: ignore[misc]
                    )
                return calls

            counted = max(1, tokens - 1)
            moved = batch * (SLOT * (1 + counted / interval) + record * (tokens + counted + (interval - 1) / 2))
            yield Case(f"recurrence_record, {batch} rows, {tokens} tokens", moved, 0, make)


def record_shapes() -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a token's update, key and decay."""
    heads = SHAPE.num_v_heads
    return (heads, SHAPE.value_dim), (SHAPE.num_k_heads, SHAPE.key_dim), (heads,)


def prefill_cases() -> Iterator[Case]:
    heads, key, value = SHAPE.num_v_heads, SHAPE.key_dim, SHAPE.value_dim
    for lens in ([64], [128], [512], [2048], [8192], [32768], [1024] * 8, [704] * 32):
        total = sum(lens)

        def make(lens: list[int] = lens, total: int = total) -> list[Call]:
            pool = torch.randn(len(lens), heads, value, key, device=DEVICE)
            mixed, a, b = randn(total, SHAPE.mixed_dim), randn(total, heads), randn(total, heads)
            params, index = recurrence_params(), segments(lens)
            return [lambda: OPS.recurrence_prefill(RecurrenceInputs(mixed, a, b), params, pool, index)]

        flops = total * heads * (6 * key * value + 2 * 64 * (3 * key + 2 * value))
        name = f"recurrence_prefill, {len(lens)} x {lens[0]} tokens"
        yield Case(name, 2 * total * (SHAPE.mixed_dim + heads * value) + 2 * len(lens) * SLOT, flops, make)


def conv_cases() -> Iterator[Case]:
    dim = SHAPE.mixed_dim
    for total in (128, 2048, 8192):

        def prefill(total: int = total) -> list[Call]:
            x, weight, pool, index = (
                randn(total, dim),
                randn(WIDTH, dim).t(),
                randn(1, WIDTH - 1, dim),
                segments([total]),
            )
            return [lambda: OPS.conv_prefill(x, ConvTaps(weight, None, True), pool, index)]

        yield Case(f"conv_prefill, {total} tokens", 4 * total * dim, 0, prefill)
    for rows in (1, 32, 128):

        def update(rows: int = rows) -> list[Call]:
            x, weight, pool = randn(rows, dim), randn(WIDTH, dim).t(), randn(rows, WIDTH - 1, dim)
            slots = ints(list(range(rows)))
            return [lambda: OPS.conv_update(x, ConvTaps(weight, None, True), pool, DecodeIndex(slots, slots))]

        yield Case(f"conv_update, {rows} rows", 2 * rows * dim * 2 * WIDTH, 0, update)


def verify_indices(count: int, rows: int, tokens: int) -> list[VerifyIndex]:
    """Return indexes of steps with different slots. Each row has this many tokens, and one pending token fewer."""
    own, offsets = ints(list(range(rows))), ints(list(range(0, rows * tokens + 1, tokens)))
    pending, mark, marked = (ints([value] * rows) for value in (tokens - 1, 0, -1))
    slots = [ints(list(range(i * rows, (i + 1) * rows))) for i in range(count)]
    return [VerifyIndex(at, at, offsets, pending, mark, marked, own, own + rows, own) for at in slots]


def verify_cases() -> Iterator[Case]:
    """Yield rows with drafts, of whose last step all tokens except one have to be folded."""
    heads, dim, shapes = SHAPE.num_v_heads, SHAPE.mixed_dim, record_shapes()
    record = 4 * sum(math.prod(shape) for shape in shapes)
    for rows in (1, 8, 32, 128):
        for tokens in (1, 2, 3, 4):
            folded = tokens - 1

            def recurrence(rows: int = rows, tokens: int = tokens) -> list[Call]:
                count, total = turns(rows * SLOT), rows * tokens
                pool = torch.randn(count * rows, heads, SHAPE.value_dim, SHAPE.key_dim, device=DEVICE)
                mixed, a, b, params = randn(total, dim), randn(total, heads), randn(total, heads), recurrence_params()
                records = [torch.zeros(2 * rows, 4, *shape, device=DEVICE) for shape in shapes]
                return [
                    lambda i=i: OPS.recurrence_verify(RecurrenceInputs(mixed, a, b), params, pool, i, records)  # type: ignore[misc]
                    for i in verify_indices(count, rows, tokens)
                ]

            def conv(rows: int = rows, tokens: int = tokens) -> list[Call]:
                x, weight, pool = randn(rows * tokens, dim), randn(WIDTH, dim).t(), randn(rows, WIDTH - 1, dim)
                (index,), records = verify_indices(1, rows, tokens), [randn(rows, 4, dim)]
                return [lambda: OPS.conv_verify(x, ConvTaps(weight, None, True), pool, index, records)]

            moved = rows * (2 * SLOT + (folded + (tokens > 1) * tokens) * record)
            yield Case(f"recurrence_verify, {rows} rows, {tokens} tokens, {folded} folded", moved, 0, recurrence)
            moved = 2 * rows * dim * (2 * (WIDTH - 1) + folded + (2 + (tokens > 1)) * tokens)
            yield Case(f"conv_verify, {rows} rows, {tokens} tokens, {folded} folded", moved, 0, conv)


def layer_cases() -> Iterator[Case]:
    """Yield all operators between a recurrent layer's two projections."""
    heads, value = SHAPE.num_v_heads, SHAPE.value_dim
    window = (WIDTH - 1) * SHAPE.mixed_dim
    for rows in (1, 8, 32, 128, 256):

        def step(rows: int = rows) -> list[Call]:
            layer, count = _Layer(rows, rows * turns(rows * SLOT)), turns(rows * SLOT)
            slots = [ints(list(range(i * rows, (i + 1) * rows))) for i in range(count)]
            return [lambda i=i: layer.step(DecodeIndex(i, i)) for i in slots]  # type: ignore[misc]

        row = SHAPE.mixed_dim + 2 * heads * value
        yield Case(f"recurrent step, {rows} rows", 2 * rows * (SLOT + 2 * window + row), 0, step)
    for lens in ([128], [512], [704] * 32):
        total = sum(lens)

        def prefill(lens: list[int] = lens, total: int = total) -> list[Call]:
            layer, index = _Layer(total, len(lens)), segments(lens)
            return [lambda: layer.prefill(index)]

        moved = 2 * total * (SHAPE.mixed_dim + 2 * heads * value) + 2 * len(lens) * (SLOT + 2 * window)
        yield Case(f"recurrent prefill, {len(lens)} x {lens[0]} tokens", moved, 0, prefill)


class _Layer:
    """Inputs of one recurrent layer's operators for `tokens` tokens, and its pools."""

    def __init__(self, tokens: int, slots: int) -> None:
        heads, value = SHAPE.num_v_heads, SHAPE.value_dim
        self._x, self._gate = randn(tokens, SHAPE.mixed_dim), randn(tokens, heads, value)
        self._a, self._b = randn(tokens, heads), randn(tokens, heads)
        self._weight, self._norm = randn(WIDTH, SHAPE.mixed_dim).t(), torch.rand(value, device=DEVICE)
        self._params, self._windows = recurrence_params(), randn(slots, WIDTH - 1, SHAPE.mixed_dim)
        self._matrices = torch.randn(slots, heads, value, SHAPE.key_dim, device=DEVICE)

    def step(self, index: DecodeIndex) -> Tensor:
        mixed = OPS.conv_update(self._x, ConvTaps(self._weight, None, True), self._windows, index)
        out = OPS.recurrence_decode(RecurrenceInputs(mixed, self._a, self._b), self._params, self._matrices, index)
        return OPS.gated_rmsnorm(out, self._gate, self._norm, 1e-6)

    def prefill(self, index: SegmentIndex) -> Tensor:
        mixed = OPS.conv_prefill(self._x, ConvTaps(self._weight, None, True), self._windows, index)
        out = OPS.recurrence_prefill(RecurrenceInputs(mixed, self._a, self._b), self._params, self._matrices, index)
        return OPS.gated_rmsnorm(out, self._gate, self._norm, 1e-6)


def row_cases() -> Iterator[Case]:
    """Yield the operators that compute each token by itself."""
    heads, value = SHAPE.num_v_heads, SHAPE.value_dim
    for tokens in (1, 128, 8192):

        def norms(tokens: int = tokens) -> list[Call]:
            x, residual, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), torch.randn(HIDDEN, device=DEVICE)
            return [lambda: OPS.add_rmsnorm(x, residual, weight, 1e-6)]

        def gated(tokens: int = tokens) -> list[Call]:
            x, gate = randn(tokens, heads, value), randn(tokens, heads, value)
            weight = torch.randn(value, device=DEVICE)
            return [lambda: OPS.gated_rmsnorm(x, gate, weight, 1e-6)]

        def silu(tokens: int = tokens) -> list[Call]:
            x = randn(tokens, 2 * INNER)
            return [lambda: OPS.silu_mul(x)]

        yield Case(f"add_rmsnorm, {tokens} tokens", 8 * tokens * HIDDEN, 0, norms)
        yield Case(f"gated_rmsnorm, {tokens} tokens", 6 * tokens * heads * value, 0, gated)
        yield Case(f"silu_mul, {tokens} tokens", 6 * tokens * INNER, 0, silu)


def copy_cases() -> Iterator[Case]:
    conv = (WIDTH - 1) * SHAPE.mixed_dim
    for rows in (1, 8, 32):

        def make(rows: int = rows) -> list[Call]:
            pools = [randn(2 * rows, WIDTH - 1, SHAPE.mixed_dim) for _ in range(LAYERS)]
            shape = (2 * rows, SHAPE.num_v_heads, SHAPE.value_dim, SHAPE.key_dim)
            pools += [torch.randn(*shape, device=DEVICE) for _ in range(LAYERS)]
            source, target = ints(list(range(rows))), ints(list(range(rows, 2 * rows)))
            return [lambda: OPS.state_copy(pools, source, target)]

        yield Case(f"state_copy, {rows} states of {LAYERS} layers", 2 * rows * LAYERS * (SLOT + 2 * conv), 0, make)


def cases() -> Iterator[Case]:
    yield from decode_cases()
    yield from record_cases()
    yield from prefill_cases()
    yield from conv_cases()
    yield from verify_cases()
    yield from layer_cases()
    yield from row_cases()
    yield from copy_cases()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, product = ceilings()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    commit = options.commit or commit_hash()
    print(f"{torch.cuda.get_device_name()}, {versions}, {DTYPE}, states fp32, commit {commit}, {today()}")
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, matrix product {product / 1e12:.0f} TFLOP/s\n")
    print_cases(cases(), options.only, copy, product)


def print_cases(cases: Iterable[Case], only: str, copy: float, product: float) -> None:
    """Time the cases whose names contain `only`, and print them next to their floors at these two rates."""
    print("| operator | µs | floor µs | of the ceiling | by |\n|---|---|---|---|---|")
    for case in cases:
        if only in case.name:
            took = median_seconds(case.make())
            moved, computed = case.num_bytes / copy, case.flops / product
            by, floor = "operations" if computed > moved else "bytes", max(moved, computed)
            print(f"| {case.name} | {took * 1e6:.1f} | {floor * 1e6:.1f} | {floor / took:.0%} | {by} |", flush=True)


if __name__ == "__main__":
    main()

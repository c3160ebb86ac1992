"""Graphs of recorded work: one for each padded shape, all of which read their inputs from one region."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import torch

from forkpoint.platforms.packing import Arrays, Tensors, places_of, views
from forkpoint.platforms.platform import DeviceEvent, Platform
from forkpoint.runtime.step_inputs import StepShape

LOGGER = logging.getLogger(__name__)

Shape = TypeVar("Shape")
Outputs = TypeVar("Outputs")
Issue: TypeAlias = Callable[[Tensors, Shape], Outputs]

MAX_GRAPH_TOKENS = 1024  # tokens; longer steps of most models hide the launches of their kernels
# On hosts of H200s, launching a layer's kernels took 1.0 ms without experts and 1.5 to 2.5 ms with them. Long prompts
# ran at 3.9e14 to 5.6e14 operations a second.
DENSE_LAUNCH_S, SPARSE_LAUNCH_S, DEVICE_FLOPS = 1e-3, 1.5e-3, 5e14
_DECODES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_DECODE_TOKENS = (0, 8, 32, 64, 128, 256, 384, 512)  # tokens of decode rows in steps that also prefill
_DRAFTING = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows in steps with drafts
_SPANS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of each row in steps with drafts
_TOTALS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # tokens in steps that prefill
# Also, if launches take longer than their work, with as many tokens of decode rows. They are few, because each graph
# takes memory. The largest holds a prompt's part of 8,192 tokens next to 512 rows.
_LONG_TOTALS = {
    (1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096): (0, 32, 128, 512),
    (5120, 6144, 7168, 8192, 8704): (0, 128, 512),
}
_TOKENS_PER_SEGMENT = 32  # prefill tokens of a shape for each of its segments: short chunks are common
_MIN_SEGMENTS = 4
_NUM_STAGED = 3  # steps whose inputs may still wait for their copy: two in flight and the one under construction


def longest_worth_recording(
    flops_per_token: int, num_dense_layers: int, num_sparse_layers: int, num_full_step_tokens: int
) -> int:
    """Return up to how many tokens a step that prefills takes longer to launch than to run.

    A full step of decode rows and prompts may need a shape of a quarter more tokens, the next larger one.
    """
    launch_s = DENSE_LAUNCH_S * num_dense_layers + SPARSE_LAUNCH_S * num_sparse_layers
    longest = int(launch_s * DEVICE_FLOPS / max(1, flops_per_token))
    return min(longest, num_full_step_tokens * 5 // 4)


def graph_shapes(max_num_rows: int, *, max_num_drafts: int = 0, max_prefill_tokens: int = 0) -> tuple[StepShape, ...]:
    """Return all shapes to record, largest first, so that smaller graphs reuse the memory of larger ones.

    Steps with drafts, of a row at most `max_num_drafts`, have MAX_GRAPH_TOKENS tokens at most. Steps that prefill have
    as many, or `max_prefill_tokens` if that is more. With drafts, shapes that prefill verify them too.
    """
    counts = sorted({count for count in _DECODES if count < max_num_rows} | {max_num_rows})
    shapes = [StepShape(count, 0, 0) for count in counts]
    if max_num_drafts:
        spans = {size for size in _SPANS if size <= max_num_drafts} | {1 + max_num_drafts}
        rows = {count for count in _DRAFTING if count < max_num_rows} | {max_num_rows}
        shapes += [
            StepShape(count * size, 0, 0, count)
            for count in sorted(rows)
            for size in sorted(spans)
            if count * size <= MAX_GRAPH_TOKENS
        ]
    totals: dict[int, tuple[int, ...]] = dict.fromkeys(_TOTALS, _DECODE_TOKENS)
    for long_totals, choices in _LONG_TOTALS.items():
        totals |= {total: choices for total in long_totals if total <= max_prefill_tokens}
    for total, choices in totals.items():
        counts = sorted({min(count, max_num_rows * (1 + max_num_drafts)) for count in choices})
        for count in (count for count in counts if total - count >= total // 2):
            tokens = total - count
            segments = min(max_num_rows, max(_MIN_SEGMENTS, tokens // _TOKENS_PER_SEGMENT))
            shapes.append(StepShape(count, tokens, segments, min(count, max_num_rows) if max_num_drafts else 0))
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_decodes), reverse=True))


class ShapeTable:
    """Finds the smallest recorded shape that a step fits into."""

    def __init__(self, shapes: Sequence[StepShape]) -> None:
        self._shapes: dict[str, list[StepShape]] = {"prefill": [], "verify": [], "decode": []}
        for shape in sorted(shapes, key=lambda s: (s.num_tokens, s.num_decodes, s.num_verified)):
            self._shapes[_kind(shape)].append(shape)

    def find(self, exact: StepShape) -> StepShape | None:
        """Return the smallest recorded shape that holds `exact`; None if there is none."""
        shapes = self._shapes[_kind(exact)]
        for shape in shapes[bisect_left(shapes, exact.num_tokens, key=lambda s: s.num_tokens) :]:
            if (
                shape.num_decodes >= exact.num_decodes
                and shape.num_verified >= exact.num_verified
                and shape.num_prefill_tokens >= exact.num_prefill_tokens
                and shape.num_segments >= exact.num_segments
            ):
                return shape
        return None


def _kind(shape: StepShape) -> str:
    if shape.num_segments:
        return "prefill"
    if shape.num_verified:
        return "verify"
    return "decode"


class InputRegion:
    """The device memory that recorded work reads its inputs from, and staged copies of it on the host."""

    def __init__(self, platform: Platform, capacity: int) -> None:
        self._platform = platform
        self.device = torch.zeros(capacity, dtype=torch.uint8, device=platform.device)
        self._staged = [platform.host_buffer((capacity,), torch.uint8) for _ in range(_NUM_STAGED)]
        self._views = [buffer.numpy().data for buffer in self._staged]
        self._copied: list[DeviceEvent | None] = [None] * _NUM_STAGED
        self._turn = 0

    def fill(self, arrays: Arrays, offsets: Mapping[str, int]) -> None:
        """Copy the arrays to their `offsets` in bytes. An array may be shorter than its place.

        Waits only if all staged copies are in use.
        """
        assert arrays.keys() == offsets.keys(), "a step's arrays are not those that its graph reads"
        self._turn = (self._turn + 1) % _NUM_STAGED
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        view, end = self._views[self._turn], 0
        for name, array in arrays.items():
            offset = offsets[name]
            view[offset : offset + array.nbytes] = array.tobytes()
            end = max(end, offset + array.nbytes)
        self.device[:end].copy_(self._staged[self._turn][:end], non_blocking=True)
        self._copied[self._turn] = self._platform.record_event()


@dataclass(frozen=True, slots=True)
class _Graph(Generic[Outputs]):
    offsets: Mapping[str, int]
    replay: Callable[[], None]
    outputs: list[Outputs]  # those of the work issued last


class Graphs(Generic[Shape, Outputs]):
    """Graphs of work that has one of several shapes. A shape is recorded when it is first replayed, or before.

    `padding` has, for each shape, inputs of nothing but padding, the largest shape first. Each of these arrays is as
    large as any that the shape may have. The methods' `issue(tensors, shape)` issues the work on these inputs.
    """

    def __init__(self, platform: Platform, padding: Mapping[Shape, Arrays], runs_before_recording: bool = True) -> None:
        """`runs_before_recording`: work runs once before it is recorded, to load its kernels and to link to ranks."""
        self._platform, self._padding, self._runs_before_recording = platform, padding, runs_before_recording
        self._graphs: dict[Shape, _Graph[Outputs]] = {}
        sizes = (places_of(arrays)[1] for arrays in padding.values())
        self._region = InputRegion(platform, max(sizes, default=0))

    @property
    def shapes(self) -> Collection[Shape]:
        """All shapes, recorded or not."""
        return self._padding.keys()

    def issue_all(self, issue: Issue[Shape, Outputs]) -> None:
        """Issue the work of each shape on padding, without recording it."""
        for shape in self._padding:
            issue(self._padded(shape), shape)

    def record_largest(self, issue: Issue[Shape, Outputs]) -> None:
        """Record the largest shape. Later graphs use the memory that its work needs."""
        for shape in itertools.islice(self._padding, 1):
            self._graphs[shape] = self._record(shape, issue)

    def record_next(self, issue: Issue[Shape, Outputs]) -> bool:
        """Record the smallest shape that is not recorded; return False if there is none."""
        missing = next((shape for shape in reversed(list(self._padding)) if shape not in self._graphs), None)
        if missing is None:
            return False
        self._find(missing, issue)
        return True

    def replay(self, shape: Shape, arrays: Arrays, issue: Issue[Shape, Outputs]) -> Outputs:
        """Issue the work of a shape on these inputs. Its outputs are void once the next work is issued."""
        graph = self._find(shape, issue)
        self._region.fill(arrays, graph.offsets)
        graph.replay()
        return graph.outputs[-1]

    def clear(self) -> None:
        """Drop all graphs, and with them the objects that they refer to."""
        self._graphs.clear()

    def _find(self, shape: Shape, issue: Issue[Shape, Outputs]) -> _Graph[Outputs]:
        """Return the graph of a shape. If there is no memory to record it, its work is issued kernel by kernel."""
        if shape not in self._graphs:
            try:
                self._graphs[shape] = self._record(shape, issue)
            except torch.OutOfMemoryError:
                LOGGER.warning("no memory is left to record %s, so such steps are slower; lower max_num_seqs", shape)
                self._graphs[shape] = self._unrecorded(shape, issue)
        return self._graphs[shape]

    def _record(self, shape: Shape, issue: Issue[Shape, Outputs]) -> _Graph[Outputs]:
        graph = self._unrecorded(shape, issue)
        if self._runs_before_recording:
            graph.replay()
        return replace(graph, replay=self._platform.record_graph(graph.replay))

    def _unrecorded(self, shape: Shape, issue: Issue[Shape, Outputs]) -> _Graph[Outputs]:
        tensors, found = self._padded(shape), list[Outputs]()

        def run() -> None:
            found[:] = [issue(tensors, shape)]

        return _Graph(places_of(self._padding[shape])[0], run, found)

    def _padded(self, shape: Shape) -> Tensors:
        """Fill the region with padding, and return the views of it that the shape's work reads."""
        arrays = self._padding[shape]
        offsets, _ = places_of(arrays)
        self._region.fill(arrays, offsets)
        return views(self._region.device, arrays, offsets)

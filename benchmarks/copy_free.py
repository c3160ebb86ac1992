"""Measures what reading one slot and writing another saves over copying states first: `python -m benchmarks.copy_free`.

The state operators of all recurrent layers of the 9B model run in one CUDA graph, in three ways. Every row stays in its
slot (no boundary). Every row reads one slot and writes another (a boundary without a copy). Or one `state_copy` of all
layers precedes rows that stay in their slots (a boundary with a copy).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from benchmarks.gpu_ops import (
    DEVICE,
    DTYPE,
    LAYERS,
    OPS,
    SHAPE,
    WIDTH,
    ints,
    median_seconds,
    randn,
    recurrence_params,
)
from benchmarks.indices import segment_index
from benchmarks.machine import commit_hash, today
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import ConvTaps, RecurrenceInputs, RecurrenceParams


@dataclass(frozen=True, slots=True)
class Layers:
    """The state operators' arguments that all layers share, and each layer's pools."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    weight: Tensor
    params: RecurrenceParams
    windows: list[Tensor]
    matrices: list[Tensor]

    @classmethod
    def create(cls, num_tokens: int, num_slots: int) -> Layers:
        heads = SHAPE.num_v_heads
        shape = (num_slots, heads, SHAPE.value_dim, SHAPE.key_dim)
        return cls(
            randn(num_tokens, SHAPE.mixed_dim),
            randn(num_tokens, heads),
            randn(num_tokens, heads),
            randn(WIDTH, SHAPE.mixed_dim).t(),
            recurrence_params(),
            [randn(num_slots, WIDTH - 1, SHAPE.mixed_dim) for _ in range(LAYERS)],
            [torch.randn(*shape, device=DEVICE) for _ in range(LAYERS)],
        )

    def decode(self, index: DecodeIndex) -> None:
        for window, matrix in zip(self.windows, self.matrices, strict=True):
            x = OPS.conv_update(self.mixed, ConvTaps(self.weight, None, True), window, index)
            OPS.recurrence_decode(RecurrenceInputs(x, self.a, self.b), self.params, matrix, index)

    def prefill(self, index: SegmentIndex) -> None:
        for window, matrix in zip(self.windows, self.matrices, strict=True):
            x = OPS.conv_prefill(self.mixed, ConvTaps(self.weight, None, True), window, index)
            OPS.recurrence_prefill(RecurrenceInputs(x, self.a, self.b), self.params, matrix, index)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        OPS.state_copy(self.windows + self.matrices, src, dst)


def report(name: str, stay: Callable[[], None], move: Callable[[], None], copy: Callable[[], None]) -> None:
    def copied() -> None:
        copy()
        stay()

    still, moved, after = (median_seconds([call], least=1) * 1e6 for call in (stay, move, copied))
    print(
        f"| {name} | {still:.0f} | {moved:.0f} | {after:.0f} | {after - moved:.0f} | {after / moved:.2f} |", flush=True
    )


def decode_rows(rows: int) -> None:
    """Time decode rows that all cross a boundary in one step."""
    layers = Layers.create(rows, 2 * rows)
    old, new = ints(list(range(rows))), ints(list(range(rows, 2 * rows)))
    report(
        f"decode, {rows} rows",
        lambda: layers.decode(DecodeIndex(new, new)),
        lambda: layers.decode(DecodeIndex(old, new)),
        lambda: layers.copy(old, new),
    )


def forks(rows: int, tokens: int) -> None:
    """Time requests that continue from one checkpoint, each with `tokens` tokens of its own."""
    layers = Layers.create(rows * tokens, rows + 1)
    lens, own = [tokens] * rows, range(1, rows + 1)
    stay = segment_index(lens, own, own, device=DEVICE)
    move = segment_index(lens, [0] * rows, own, device=DEVICE)
    source, target = ints([0] * rows), ints(list(own))
    report(
        f"{rows} forks of one checkpoint, {tokens} tokens each",
        lambda: layers.prefill(stay),
        lambda: layers.prefill(move),
        lambda: layers.copy(source, target),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    commit = options.commit or commit_hash()
    print(f"{torch.cuda.get_device_name()}, {versions}, {DTYPE}, states fp32, commit {commit}, {today()}\n")
    print(f"| state operators of {LAYERS} layers | no boundary, µs | copy-free, µs | copied, µs | saved, µs | ratio |")
    print("|---|---|---|---|---|---|")
    for rows in (1, 32, 128):
        decode_rows(rows)
    for rows, tokens in ((1, 64), (32, 1), (32, 64), (128, 16)):
        forks(rows, tokens)


if __name__ == "__main__":
    main()

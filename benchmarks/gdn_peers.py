"""Compares `recurrence_prefill` with flash-linear-attention's `chunk_gated_delta_rule`: `python -m
benchmarks.gdn_peers`.

Both get the same tokens and initial states, and return outputs and fp32 final states. Theirs gets computed gates. This
needs the packages fla-core and einops, whose kernels are tuned at their first call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu_ops import DEVICE, DTYPE, OPS, SHAPE, median_seconds, randn, recurrence_params
from benchmarks.indices import segment_index
from benchmarks.machine import commit_hash, today
from forkpoint.ops.parameters import RecurrenceInputs

LENGTHS = ([512], [2048], [8192], [32768], [1024] * 8, [704] * 32)


def compare(peer: Any, lens: Sequence[int]) -> tuple[float, float, float]:
    """Return (our seconds, their seconds, relative difference of the outputs) for segments of equal length."""
    rows, length, heads = len(lens), lens[0], SHAPE.num_v_heads
    tokens, keys = rows * length, SHAPE.num_k_heads * SHAPE.key_dim
    mixed, a, b = randn(tokens, SHAPE.mixed_dim), randn(tokens, heads), randn(tokens, heads)
    params = recurrence_params()
    pool = torch.randn(2 * rows, heads, SHAPE.value_dim, SHAPE.key_dim, device=DEVICE)
    index = segment_index(lens, range(rows), range(rows, 2 * rows), device=DEVICE)
    split = [keys, keys, heads * SHAPE.value_dim]
    widths = (SHAPE.num_k_heads, SHAPE.num_k_heads, heads)
    q, k, v = (
        x.reshape(rows, length, n, -1).contiguous() for x, n in zip(torch.split(mixed, split, 1), widths, strict=True)
    )
    g = -params.A_log.exp() * F.softplus(a.float() + params.dt_bias)
    gates = [x.view(rows, length, heads) for x in (g, b.float().sigmoid())]

    def ours() -> Tensor:
        return OPS.recurrence_prefill(RecurrenceInputs(mixed, a, b), params, pool, index)

    def theirs() -> Tensor:
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
        out: Tensor = peer(q, k, v, *gates, SHAPE.key_dim**-0.5, pool[:rows], True, **options)[0]
        return out

    with torch.no_grad():
        want = theirs().view(tokens, heads, -1).float()
        difference = float((ours().float() - want).norm() / want.norm())
        return median_seconds([ours]), median_seconds([theirs]), difference


def main() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    parser.add_argument("--first", action="store_true", help="the shortest case only")
    options = parser.parse_args()
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}, triton {triton.__version__}, fla-core {metadata.version('fla-core')}"
    commit = options.commit or commit_hash()
    print(f"{torch.cuda.get_device_name()}, {versions}, {DTYPE}, states fp32, commit {commit}, {today()}\n")
    print("| tokens | forkpoint, µs | flash-linear-attention, µs | ratio | relative difference |")
    print("|---|---|---|---|---|")
    for lens in LENGTHS[:1] if options.first else LENGTHS:
        ours, theirs, difference = compare(chunk_gated_delta_rule, lens)
        times = f"{ours * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / ours:.2f}"
        print(f"| {len(lens)} x {lens[0]} | {times} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()

"""What the tests of Triton kernels share: the device, sizes for it, and inputs in two places."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import RecurrenceParams
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable

ON_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
T = TypeVar("T", SegmentIndex, DecodeIndex, AttentionIndex)

gpu_only = pytest.mark.skipif(not ON_GPU, reason="full sizes need a GPU")


@functools.cache
def triton_ops() -> OpTable:
    from forkpoint.ops.triton_table import triton_table

    if IS_INTERPRETED:
        from tests.ops.interpreter import prepare_interpreter  # the NPU's compiler has another Triton

        prepare_interpreter()
    return triton_table(torch_table())


def sized(small: Sequence[Any], full: Sequence[Any]) -> list[Any]:
    """Cases for the interpreter, and those that a GPU runs besides."""
    return [*small, *full] if ON_GPU else list(small)


def on_device(index: T) -> T:
    """The same index with its tensors on the device."""
    moved = {name: value.to(DEVICE) for name, value in vars_of(index).items() if isinstance(value, Tensor)}
    return replace(index, **moved)


def vars_of(index: Any) -> dict[str, Any]:
    return {name: getattr(index, name) for name in index.__dataclass_fields__}


def padded(index: SegmentIndex) -> SegmentIndex:
    """The same segments in an index as of a recorded step: with room that this step does not need, no host copies."""

    def more(x: Tensor, values: list[int]) -> Tensor:
        return torch.cat((x, torch.tensor(values, dtype=x.dtype, device=x.device)))

    assert index.tiles is not None
    tokens, saves = int(index.cu_seqlens[-1]), int(index.save_ptr[-1])
    return SegmentIndex(
        more(index.cu_seqlens, [tokens] * 2),
        more(index.src, [-1] * 2),
        more(index.dst, [-1] * 2),
        more(index.save_ptr, [saves] * 2),
        more(index.save_pos, [0] * 3),
        more(index.save_dst, [-1] * 3),
        tiles=torch.cat((index.tiles, index.tiles.new_tensor([[-1, 0]] * 3))),
    )


def behind(x: Tensor, rows: int) -> Tensor:
    """`x` and then rows that no operator may look at."""
    return torch.cat((x, torch.full((rows, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)))


def params_on_device(params: RecurrenceParams) -> RecurrenceParams:
    return replace(
        params,
        A_log=params.A_log.to(DEVICE),
        dt_bias=params.dt_bias.to(DEVICE),
        D=None if params.D is None else params.D.to(DEVICE),
    )


def copy_pool(pool: Tensor) -> Tensor:
    """A padded pool on the device with the same gaps (`Tensor.clone` would drop them)."""
    slots, size = pool.shape[0], pool[0].numel()
    wide = torch.full((slots, pool.stride(0)), float("nan"), dtype=pool.dtype, device=DEVICE)
    view = wide[:, 8 : 8 + size].view(pool.shape)
    return view.copy_(pool)


def relative_error(got: Tensor, want: Tensor) -> float:
    """`|got - want| / |want|` in fp64, NaN included."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))

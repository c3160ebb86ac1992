"""Operators over rows in several launches ("turns"), for devices with a low limit of programs per launch.

Kernels over tiles use `launch_table.turns` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.ops.table import OpTable

MOST_ROWS = 2048  # rows per turn; with up to 31 programs per row, a launch stays below 65,535 programs
MOST_SAMPLED = 512  # rows of logits per turn, with one program per 2,048 logits
# Operators whose rows are independent, with the numbers of the arguments that have one row per token.
ROWS: Final = MappingProxyType({
    "linear": (0,),
    "linear_silu_mul": (0,),
    "linear_heads": (0,),
    "rmsnorm": (0,),
    "add_rmsnorm": (0, 1),
    "gated_rmsnorm": (0, 1),
    "silu_mul": (0,),
    "qk_norm_rope_write": (0, 1, 2, 5, 8),
    "latent_write": (0, 1, 5, 7),
    "route": (0,),
    "experts": (0, 2, 3),
    "sample_rows": (0, 1),
})  # fmt: skip

# the vendor's library runs these for more than a few rows, unless bits must be fixed
LIBRARY: Final = {"linear", "linear_heads"}
# The other operators with a default have it on an NPU too, because their kernels are for GPUs.
KERNELS: Final = {"window_prefill", "window_update", "window_verify"}


def by_turns(operator: Callable[..., Any], places: tuple[int, ...], most: int, *args: Any, **options: Any) -> Any:
    """Call `operator` with the arguments at `places` cut into turns of at most `most` rows; join the results."""
    if args[0].shape[0] <= most:
        return operator(*args, **options)
    cut = {place: _cut(args[place], most) for place in places}
    parts = [
        operator(*(cut[i][turn] if i in cut else arg for i, arg in enumerate(args)), **options)
        for turn in range(len(cut[0]))
    ]
    return _joined(parts)


def _cut(argument: Any, most: int) -> Sequence[Any]:
    """Split a tensor, or a tuple of columns, into parts of `most` rows."""
    if isinstance(argument, Tensor):
        return torch.split(argument, most)
    columns = {field.name: torch.split(getattr(argument, field.name), most) for field in fields(argument)}
    return [type(argument)(**dict(zip(columns, part, strict=True))) for part in zip(*columns.values(), strict=True)]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(kind) for kind in zip(*parts, strict=True))


def in_turns(table: OpTable) -> OpTable:
    """Return the table with operators over at most MOST_ROWS rows at a time, without the operators only GPUs have."""
    own = ROWS if table.deterministic else {name: ROWS[name] for name in ROWS.keys() - LIBRARY}
    most = dict.fromkeys(own, MOST_ROWS) | {"sample_rows": MOST_SAMPLED}
    cut: dict[str, Any] = {
        name: partial(by_turns, getattr(table, name), places, most[name]) for name, places in own.items()
    }
    plain: dict[str, Any] = {
        field.name: field.default
        for field in fields(OpTable)
        if field.name not in KERNELS and (field.default is None or callable(field.default))
    }
    return replace(table, **cut, **plain)

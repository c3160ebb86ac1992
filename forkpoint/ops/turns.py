"""Operators over rows in turns, for devices whose launches have few programs. Kernels over tiles take turns of their
own: `launch_table.turns`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.ops.table import OpTable

MOST_ROWS = 2048  # of a turn: with up to 31 programs for each a launch stays below 65,535
MOST_SAMPLED = 512  # rows of logits, with a program for each 2,048 of them
# The operators whose rows know nothing of each other: which of their arguments have a row of each token.
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

LIBRARY: Final = {"linear", "linear_heads"}  # the vendor's, beyond a few rows, unless a row's bits must be the same


def by_turns(operator: Callable[..., Any], places: tuple[int, ...], most: int, *args: Any, **options: Any) -> Any:
    """`operator` of these arguments, of which those at `places` are cut into turns of `most` rows."""
    if args[0].shape[0] <= most:
        return operator(*args, **options)
    cut = {place: _cut(args[place], most) for place in places}
    parts = [
        operator(*(cut[i][turn] if i in cut else arg for i, arg in enumerate(args)), **options)
        for turn in range(len(cut[0]))
    ]
    return _joined(parts)


def _cut(argument: Any, most: int) -> Sequence[Any]:
    """A tensor, or several in columns, in parts of `most` rows."""
    if isinstance(argument, Tensor):
        return torch.split(argument, most)
    columns = {field.name: torch.split(getattr(argument, field.name), most) for field in fields(argument)}
    return [type(argument)(**dict(zip(columns, part, strict=True))) for part in zip(*columns.values(), strict=True)]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(kind) for kind in zip(*parts, strict=True))


def in_turns(table: OpTable) -> OpTable:
    """The same operators, over at most MOST_ROWS rows at a time, without those of a GPU alone."""
    own = ROWS if table.deterministic else {name: ROWS[name] for name in ROWS.keys() - LIBRARY}
    most = dict.fromkeys(own, MOST_ROWS) | {"sample_rows": MOST_SAMPLED}
    cut: dict[str, Any] = {
        name: partial(by_turns, getattr(table, name), places, most[name]) for name, places in own.items()
    }
    plain: dict[str, Any] = {
        field.name: field.default for field in fields(OpTable) if field.default is None or callable(field.default)
    }
    return replace(table, **cut, **plain)

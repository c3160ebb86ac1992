"""The choice of the backend of each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from forkpoint.errors import ConfigError
from forkpoint.ops.activation import reference as activation
from forkpoint.ops.attention import pools
from forkpoint.ops.attention import reference as attention
from forkpoint.ops.attention.inputs import Inputs
from forkpoint.ops.conv1d import reference as conv1d
from forkpoint.ops.cpu.build import load_operators
from forkpoint.ops.cpu.table import cpp_table
from forkpoint.ops.linear import reference as linear
from forkpoint.ops.linear.fixed_rows import FixedRowsLinear
from forkpoint.ops.moe import reference as moe
from forkpoint.ops.norm import reference as norm
from forkpoint.ops.recurrence import record
from forkpoint.ops.recurrence import reference as recurrence
from forkpoint.ops.rope import reference as rope
from forkpoint.ops.sampling import reference as sampling
from forkpoint.ops.scan import reference as scan
from forkpoint.ops.state_copy import reference as state_copy
from forkpoint.ops.table import OpTable, operator_names, operators_of
from forkpoint.plugins import Registry

_REFERENCES = (activation, norm, conv1d, recurrence, record, scan, moe, sampling, state_copy)


def torch_table(deterministic: bool = False) -> OpTable:
    """Return every operator in torch, for any torch device.

    With `deterministic`, the bits of a row depend neither on the rest of the batch, nor on the row's place in it, nor
    on where (on the 64-token grid) its prompt was cut into chunks.
    """
    product = FixedRowsLinear() if deterministic else linear.linear
    of_linear = linear.OfLinear(linear.prepare_linear, product, activation.silu_mul)
    inputs = Inputs(norm.rmsnorm, rope.rope, attention.kv_write, attention.store_rows)
    made: dict[str, Any] = {
        **operators_of(*_REFERENCES, of_linear, inputs),
        "paged_attention": partial(attention.paged_attention, fixed=deterministic),
        "choose_pools": partial(pools.choose_pools, fixed=deterministic),
        "pool_attention": partial(pools.pool_attention, fixed=deterministic),
        "experts": partial(moe.experts_by, product),
    }
    return OpTable(**made, deterministic=deterministic, backends=dict.fromkeys(operator_names(), "torch"))


def _auto(base: OpTable) -> OpTable:
    build = load_operators()
    if build.module is not None:
        return cpp_table(build.module, base)
    return replace(base, backends=dict.fromkeys(operator_names(), f"torch (no cpp: {build.reason})"))


def _cpp(base: OpTable) -> OpTable:
    build = load_operators()
    if build.module is None:
        raise ConfigError(f"cpu_ops='cpp' is not possible here: {build.reason}; use 'torch' or 'auto'")
    return cpp_table(build.module, base)


def _torch(base: OpTable) -> OpTable:
    return base


def _triton(base: OpTable) -> OpTable:
    # imported late, because a machine without a GPU may lack Triton
    from forkpoint.ops.triton_table import triton_table

    return triton_table(base)


def _triton_in_turns(base: OpTable) -> OpTable:
    from forkpoint.ops.turns import in_turns

    return in_turns(_triton(base))


# Functions from torch's table to another table, by name.
OPERATORS: Final[Registry[Callable[[OpTable], OpTable]]] = Registry(
    "operator table",
    "forkpoint.operators",
    {"auto": _auto, "cpp": _cpp, "torch": _torch, "triton": _triton, "triton-in-turns": _triton_in_turns},
)


def register_operators(name: str, table: Callable[[OpTable], OpTable]) -> None:
    """Register a function from torch's table to another table. Raises ConfigError if the name is taken."""
    OPERATORS.add(name, table)


def select_table(name: str, deterministic: bool, force_state_copy: bool) -> OpTable:
    """Return the operators of a name: 'torch', 'cpp', 'auto' (cpp if it compiles, else torch), 'triton', ...

    Registered names work too. `backends` of the result names the backend of each operator and, if 'auto' fell back,
    why. With `force_state_copy` no operator redirects. Raises ConfigError for an unknown name, and if 'cpp' cannot be
    built.
    """
    table = OPERATORS.find(name)(torch_table(deterministic))
    if not isinstance(table, OpTable):
        raise ConfigError(f"operator table {name!r} made {table!r}; a function that returns an OpTable is needed")
    if force_state_copy:
        table = replace(table, redirects=frozenset())
    return table

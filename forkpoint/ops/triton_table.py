"""The operator table of the Triton kernels. Importing this imports Triton; `select` does so only for a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import triton

from forkpoint.ops.activation import kernel as activation
from forkpoint.ops.attention import image_kernel, inputs_kernel, latent_kernel, pool_choice_kernel, store_kernel
from forkpoint.ops.attention.expanded_kernel import latent_prefill
from forkpoint.ops.attention.kernel import TritonPagedAttention
from forkpoint.ops.attention.pool_attention_kernel import TritonPoolAttention
from forkpoint.ops.conv1d import kernel as conv1d
from forkpoint.ops.conv1d import verify_kernel as conv_verify
from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.moe import route_kernel
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.norm import kernel as norm
from forkpoint.ops.norm import layer_kernel, mix_kernel
from forkpoint.ops.recurrence import decode_kernel, prefill_kernel, record_kernel
from forkpoint.ops.rows import host_rows_kernel
from forkpoint.ops.rows import kernel as rows
from forkpoint.ops.sampling import choose_kernel, shortlist_kernel
from forkpoint.ops.sampling import kernel as sampling
from forkpoint.ops.scan import kernel as scan
from forkpoint.ops.scan import prefill_kernel as scan_prefill
from forkpoint.ops.side_by_side import SideStream
from forkpoint.ops.state_copy.kernel import StateCopy
from forkpoint.ops.table import OpTable, operator_names, operators_of

_OPERATORS = (
    *(activation, inputs_kernel, latent_kernel, conv1d, conv_verify, route_kernel, norm, choose_kernel, sampling),
    *(mix_kernel, shortlist_kernel, decode_kernel, prefill_kernel, record_kernel, scan, scan_prefill, rows),
    *(image_kernel, layer_kernel, pool_choice_kernel, store_kernel, host_rows_kernel),
)


def triton_table(base: OpTable) -> OpTable:
    """Return `base` with the Triton operators.

    Each kernel computes a row from that row alone, in one order of operations and one fixed configuration, so it also
    serves deterministic tables. Attention gets `deterministic`, because it would otherwise split keys for few queries.
    """
    side_by_side = SideStream()
    attention = TritonPagedAttention(base.deterministic, side_by_side)
    product, experts = DeviceLinear(base.deterministic, activation.silu_mul), DeviceExperts(base.deterministic)
    replaced: dict[str, Any] = {
        "prepare_experts": experts.prepare,
        "experts": experts,
        "paged_attention": attention,
        "partial_attention": attention.partial,
        "pool_attention": TritonPoolAttention(base.deterministic),
        "state_copy": StateCopy(),
        "side_by_side": side_by_side,
    }
    replaced |= operators_of(*_OPERATORS, product)
    backends = dict.fromkeys(replaced.keys() & set(operator_names()), f"triton {triton.__version__}")
    replaced |= {"linear_parts": partial(product.linear, parts=True), "experts_parts": partial(experts, parts=True)}
    table = replace(base, **replaced, backends={**base.backends, **backends})
    if base.deterministic:
        return table
    # latent_prefill is chosen by a chunk's size, which would make bits depend on where a prompt was cut.
    table = replace(table, wide_linear=product.wide, latent_prefill=latent_prefill)
    names = ("rmsnorm", "add_rmsnorm", "gated_rmsnorm")
    rounding: dict[str, Any] = {name: partial(replaced[name], rounded=True) for name in names}
    rounding["linear_silu_mul"] = DeviceLinear(False, partial(activation.silu_mul, rounded=True)).linear_silu_mul
    return replace(table, rounding=replace(table, **rounding, rounds=True))

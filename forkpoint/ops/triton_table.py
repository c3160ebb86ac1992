"""The operator table of the Triton kernels. Importing this imports Triton; `select` does so only for a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import triton

from forkpoint.ops.activation import kernel as activation
from forkpoint.ops.attention.expanded_kernel import latent_prefill
from forkpoint.ops.attention.inputs_kernel import qk_norm_rope_write
from forkpoint.ops.attention.kernel import PagedAttention
from forkpoint.ops.attention.latent_kernel import latent_write
from forkpoint.ops.conv1d import kernel as conv1d
from forkpoint.ops.conv1d.verify_kernel import conv_fold, conv_verify
from forkpoint.ops.linear.device_linear import DeviceLinear
from forkpoint.ops.moe.device_experts import DeviceExperts
from forkpoint.ops.moe.route_kernel import route
from forkpoint.ops.norm import kernel as norm
from forkpoint.ops.recurrence.decode_kernel import recurrence_decode
from forkpoint.ops.recurrence.prefill_kernel import recurrence_prefill
from forkpoint.ops.recurrence.record_kernel import recurrence_record, recurrence_settle
from forkpoint.ops.recurrence.step_kernel import conv_record
from forkpoint.ops.recurrence.verify_kernel import recurrence_fold, recurrence_verify
from forkpoint.ops.sampling import kernel as sampling
from forkpoint.ops.sampling.choose_kernel import sample_rows
from forkpoint.ops.scan.kernel import scan_decode
from forkpoint.ops.scan.prefill_kernel import scan_prefill
from forkpoint.ops.scan.verify_kernel import scan_fold, scan_verify
from forkpoint.ops.state_copy.kernel import StateCopy
from forkpoint.ops.table import OpTable


def triton_table(base: OpTable) -> OpTable:
    """`base` with its operators replaced by those of a GPU.

    Each kernel computes a row from that row alone, in one order of operations and one fixed configuration, so that
    they serve deterministic tables as they are; attention, which would spread few queries over the device, is told.
    """
    product, experts = DeviceLinear(base.deterministic, activation.silu_mul), DeviceExperts(base.deterministic)
    replaced: dict[str, Any] = {
        "prepare_linear": product.prepare,
        "linear": product.linear,
        "linear_silu_mul": product.linear_silu_mul,
        "prepare_linear_heads": product.prepare_heads,
        "linear_heads": product.linear_heads,
        "route": route,
        "prepare_experts": experts.prepare,
        "experts": experts,
        "rmsnorm": norm.rmsnorm,
        "add_rmsnorm": norm.add_rmsnorm,
        "gated_rmsnorm": norm.gated_rmsnorm,
        "silu_mul": activation.silu_mul,
        "qk_norm_rope_write": qk_norm_rope_write,
        "latent_write": latent_write,
        "paged_attention": PagedAttention(base.deterministic),
        "conv_prefill": conv1d.conv_prefill,
        "conv_update": conv1d.conv_update,
        "recurrence_prefill": recurrence_prefill,
        "recurrence_decode": recurrence_decode,
        "recurrence_record": recurrence_record,
        "recurrence_settle": recurrence_settle,
        "scan_prefill": scan_prefill,
        "scan_decode": scan_decode,
        "scan_verify": scan_verify,
        "scan_fold": scan_fold,
        "conv_verify": conv_verify,
        "conv_fold": conv_fold,
        "recurrence_verify": recurrence_verify,
        "recurrence_fold": recurrence_fold,
        "state_copy": StateCopy(),
        "greedy": sampling.greedy,
        "sample_rows": sample_rows,
        "apply_penalties": sampling.apply_penalties,
        "apply_bitmasks": sampling.apply_bitmasks,
    }
    backends = dict.fromkeys(replaced, f"triton {triton.__version__}")
    # What is chosen by a chunk's size would let bits depend on where a prompt was cut.
    long_latents = None if base.deterministic else latent_prefill
    optional: dict[str, Any] = {
        "latent_prefill": long_latents,
        "linear_both": product.linear_both,
        "conv_record": conv_record,
        "linear_parts": partial(product.linear, parts=True),
        "experts_parts": partial(experts, parts=True),
    }
    table = replace(base, **replaced, **optional, backends={**base.backends, **backends})
    if base.deterministic:
        return table
    table = replace(table, wide_linear=product.wide)
    names = ("rmsnorm", "add_rmsnorm", "gated_rmsnorm")
    rounding: dict[str, Any] = {name: partial(replaced[name], rounded=True) for name in names}
    rounding["linear_silu_mul"] = DeviceLinear(False, partial(activation.silu_mul, rounded=True)).linear_silu_mul
    return replace(table, rounding=replace(table, **rounding))

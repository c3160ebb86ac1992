"""The gated delta rule through flash-linear-attention 0.6 on an NVIDIA GPU.

Triton 3.4 to 3.7.0 miscompile one kernel of its backward pass for Hopper GPUs, and the library refuses to run it there.
That step has no sequential part, so it is done here with matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fla.backends import BaseBackend, register
from fla.ops.common import chunk_delta_h, chunk_o
from fla.ops.gated_delta_rule import chunk_fwd, chunk_gated_delta_rule, wy_fast
from fla.ops.utils import cumsum
from torch import Tensor
from triton import Config

from train.chunk_gradients import chunk_gradients
from train.delta_rule import CHUNK

_compiled_gradients: Callable[..., tuple[Tensor, ...]] = torch.compile(chunk_gradients, dynamic=False)


def fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Implement `train.delta_rule.DeltaRule` for bf16 q, k, v and fp32 gates."""
    if q.shape[1] % CHUNK:
        raise ValueError(f"rows of {q.shape[1]} tokens; pad them to a multiple of {CHUNK}")
    out: Tensor = chunk_gated_delta_rule(q, k, v, g, beta)[0]
    return out


class _MatrixProducts(BaseBackend):
    backend_type = "matrix_products"
    priority = 1

    def chunk_bwd_dqkwg_verifier(self, **given: Any) -> tuple[bool, str | None]:
        fits = given.get("cu_seqlens") is None and not given.get("state_v_first") and given.get("chunk_size") == CHUNK
        return fits and given.get("g") is not None and given.get(
            "w"
        ) is not None, "serves equal rows of this rule alone"

    def chunk_bwd_dqkwg(self, **given: Any) -> tuple[Tensor, ...]:
        """Compute the gradients. Compiled for one shape, because chunks do not depend on their row."""
        q, scale = given["q"], given["scale"]
        names = ("q", "k", "v", "do", "dv", "h", "dh", "g")
        gradients = _compiled_gradients(*(given[name].flatten(0, 1)[None] for name in names), scale)
        return tuple(x.view(*q.shape[:2], *x.shape[2:]) for x in gradients)


def _fix_launches() -> None:
    """Fix the launch options that tuning chose on an H200 for heads of 64. Trying all candidates again takes longer
    than it saves."""
    tiles = {"BK": 32, "BV": 32}
    chosen = {
        cumsum.chunk_local_cumsum_scalar_kernel: Config({}, num_warps=2),
        chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel: Config({"BK": 32}, num_warps=2),
        wy_fast.recompute_w_u_fwd_kernel: Config({}, num_warps=2, num_stages=3),
        wy_fast.prepare_wy_repr_bwd_kernel: Config({}, num_warps=4, num_stages=3),
        chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64: Config({"BV": 32}, num_warps=4, num_stages=3),
        chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64: Config({"BV": 32}, num_warps=2, num_stages=3),
        chunk_o.chunk_fwd_kernel_o: Config(tiles, num_warps=2, num_stages=3),
        chunk_o.chunk_bwd_kernel_dv_local: Config({}, num_warps=4, num_stages=3),
    }
    for kernel, config in chosen.items():
        kernel.fn.configs = [config]  # below the heuristics stands the tuner


register("common")(_MatrixProducts)
_fix_launches()

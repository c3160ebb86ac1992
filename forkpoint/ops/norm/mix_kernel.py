"""The mixture of a token's residuals in Triton. A program computes one token, source by source."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_source(value, factor, eps, most, total, mixed, D: tl.constexpr):
    """Add a source to a running softmax: returns (largest score, sum of exponentials, weighted sum)."""
    score = tl.sum(value * factor, axis=0) * tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    largest = tl.maximum(most, score)
    kept, own = tl.exp(most - largest), tl.exp(score - largest)
    return largest, total * kept + own, mixed * kept + own * value


@triton.jit(do_not_specialize=["count"])
def _mix_kernel(
    done, current, weight, out, count, done_source, done_token, current_token, eps, D: tl.constexpr
):  # fmt: skip
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    inside = at < D
    factor = tl.load(weight + at, mask=inside, other=0.0)
    most, total, mixed = -float("inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    done += token * done_token
    for source in range(count):
        value = tl.load(done + source * done_source + at, mask=inside, other=0.0).to(tl.float32)
        most, total, mixed = _add_source(value, factor, eps, most, total, mixed, D)
    if current is not None:
        value = tl.load(current + token * current_token + at, mask=inside, other=0.0).to(tl.float32)
        most, total, mixed = _add_source(value, factor, eps, most, total, mixed, D)
    tl.store(out + token * D + at, (mixed / total).to(out.dtype.element_ty), mask=inside)


def mix_residuals(done: Tensor, current: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Implement `table.MixResiduals`."""
    count, num_tokens, size = done.shape
    out = done.new_empty(num_tokens, size)
    if num_tokens:
        assert done.stride(2) == 1 and (current is None or current.stride(1) == 1), "rows must be dense"
        strides = (done.stride(0), done.stride(1), 0 if current is None else current.stride(0))
        warps = 8 if size > 2048 else 4
        _mix_kernel[(num_tokens,)](done, current, weight, out, count, *strides, eps, D=size, num_warps=warps)
    return out

"""Exchanges between ranks whose devices can write to each other's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forkpoint.ops.exchange import merge_kernel
from forkpoint.ops.exchange import rows_kernel as rows
from forkpoint.ops.exchange.kernel import PROGRAMS, WORDS, Inboxes, Own, exchange, sum_add_rmsnorm, takes
from forkpoint.ops.exchange.kernel import inbox_words as few_inbox_words
from forkpoint.ops.linear.fp8_kernel import Rounded
from forkpoint.ops.unmade import Parts

FEW_BYTES = 1 << 19  # bytes per rank; up to here kernel.py (numbered words) is used, above it rows_kernel.py


def inbox_words(size: int) -> int:
    """Return the size of one rank's inboxes in int64 words: of small exchanges, then of row exchanges."""
    return few_inbox_words(size) + rows.inbox_words(size) // 2


class RankExchange:
    """One rank's side of the exchanges. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, addresses: Sequence[int], device: torch.device, owner: Any = None) -> None:
        """`addresses` are those of the ranks' inboxes, each of `inbox_words` zeros. `owner` keeps their memory
        alive."""
        self.rank, self.size, self._owner = rank, len(addresses), owner
        few = torch.tensor(addresses, dtype=torch.int64, device=device)
        many = few + 8 * few_inbox_words(self.size)
        self._few, self._many = Inboxes.of(rank, few, PROGRAMS), Inboxes.of(rank, many, rows.PROGRAMS)

    @classmethod
    def meet(cls, rank: int, size: int, device: torch.device) -> RankExchange:
        """Set up the exchanges of a process group. All its ranks call this."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # unused here
        from torch.distributed import _symmetric_memory as symmetric

        inbox = symmetric.empty(inbox_words(size), dtype=torch.int64, device=device)
        assert dist.group.WORLD is not None
        handle = symmetric.rendezvous(inbox, dist.group.WORLD)
        inbox.zero_()
        torch.accelerator.synchronize(device)
        dist.barrier()
        return cls(rank, handle.buffer_ptrs, device, (inbox, handle))

    def takes(self, x: Tensor) -> bool:
        """Return whether `sum` supports a bfloat16 tensor like `x`."""
        return takes(x)

    def gathers(self, x: Tensor) -> bool:
        """Return whether `gather` supports `x`."""
        return isinstance(x, Parts) or takes(x) or rows.takes(x)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' bfloat16 `x`, rounded once."""
        return exchange(x, x.new_empty(x.shape), self._few, sums=True)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' rows: `x[..., K] -> [..., size * K]`. x may be `Parts`."""
        own, dtype = (x.own[:, 0], torch.bfloat16) if isinstance(x, Parts) else (x, x.dtype)
        out = own.new_empty(*own.shape[:-1], self.size * own.shape[-1], dtype=dtype)
        if own is x and takes(x) and (_is_few(x) or not rows.takes(x)):
            return exchange(x, out, self._few, sums=False)
        return rows.gather(Own.of(x), out, self._many)

    def merges(self, parts: Tensor) -> bool:
        """Return whether `merge` supports `parts`."""
        return merge_kernel.takes(parts)

    def merge(self, parts: Tensor, out: Tensor) -> Tensor:
        """Merge attention over keys that ranks share: `parts[N, size, G, D + 1]` in fp32 into `out[N, G, D]`."""
        return merge_kernel.merge(parts.contiguous(), out, self._many)

    def takes_parts(self, width: int, dtype: torch.dtype) -> bool:
        """Return whether `sum_add_rmsnorm` and `gather` support rows of this width, also as `Parts`."""
        return dtype == torch.bfloat16 and rows.takes_row(width * dtype.itemsize)

    def sum_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounded: bool = False) -> Tensor:
        """Add the all-reduced x, which may be `Parts`, to the residual in place; return the norm of the residual.

        With `rounded`, the norm also carries its FP8 form."""
        own, out = Own.of(x), Rounded.room(*residual.shape, like=residual, rounded=rounded)
        if _is_few(residual) and len(residual) <= PROGRAMS and residual.shape[1] <= 2 * WORDS:
            return sum_add_rmsnorm(own, residual, weight, eps, self._few, out)
        return rows.sum_add_rmsnorm(own, residual, weight, eps, self._many, out)


def _is_few(x: Tensor) -> bool:
    return x.numel() * x.element_size() <= FEW_BYTES

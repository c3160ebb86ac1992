"""Ranks whose devices reach each other's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forkpoint.ops.exchange import rows_kernel as rows
from forkpoint.ops.exchange.kernel import PROGRAMS, WORDS, Inboxes, Own, exchange, sum_add_rmsnorm, takes
from forkpoint.ops.exchange.kernel import inbox_words as few_inbox_words
from forkpoint.ops.linear.fp8_kernel import Rounded
from forkpoint.ops.unmade import Parts

FEW_BYTES = 1 << 19  # of a rank, which go word by word


def inbox_words(size: int) -> int:
    """Of one of `size` ranks, as int64: of small exchanges, then of many rows."""
    return few_inbox_words(size) + rows.inbox_words(size) // 2


class Peers:
    """One rank's end of the exchanges, which all ranks make in the same order."""

    def __init__(self, rank: int, addresses: Sequence[int], device: torch.device, owner: Any = None) -> None:
        """`addresses` are those of the ranks' inboxes, `inbox_words` zeros each, which live as long as `owner`."""
        self.rank, self.size, self._owner = rank, len(addresses), owner
        few = torch.tensor(addresses, dtype=torch.int64, device=device)
        many = few + 8 * few_inbox_words(self.size)
        self._few, self._many = Inboxes.of(rank, few, PROGRAMS), Inboxes.of(rank, many, rows.PROGRAMS)

    @classmethod
    def meet(cls, rank: int, size: int, device: torch.device) -> Peers:
        """For the ranks of the process group; all of them call this."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # nothing here uses it
        from torch.distributed import _symmetric_memory as symmetric

        inbox = symmetric.empty(inbox_words(size), dtype=torch.int64, device=device)
        assert dist.group.WORLD is not None
        handle = symmetric.rendezvous(inbox, dist.group.WORLD)
        inbox.zero_()
        torch.accelerator.synchronize(device)
        dist.barrier()
        return cls(rank, handle.buffer_ptrs, device, (inbox, handle))

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` can be asked for one of bfloat16."""
        return takes(x)

    def gathers(self, x: Tensor) -> bool:
        """Whether `gather` can be asked for."""
        return isinstance(x, Parts) or takes(x) or rows.takes(x)

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' `x`, bfloat16, rounded once."""
        return exchange(x, x.new_empty(x.shape), self._few, sums=True)

    def gather(self, x: Tensor) -> Tensor:
        """`x[..., K] -> [..., size * K]`: the ranks' rows side by side; x may be `Parts`."""
        own, dtype = (x.own[:, 0], torch.bfloat16) if isinstance(x, Parts) else (x, x.dtype)
        out = own.new_empty(*own.shape[:-1], self.size * own.shape[-1], dtype=dtype)
        if own is x and takes(x) and (_is_few(x) or not rows.takes(x)):
            return exchange(x, out, self._few, sums=False)
        return rows.gather(Own.of(x), out, self._many)

    def takes_parts(self, width: int, dtype: torch.dtype) -> bool:
        """Whether `sum_add_rmsnorm` and `gather` can be asked for rows of this width, and for `Parts` of them."""
        return dtype == torch.bfloat16 and rows.takes_row(width * dtype.itemsize)

    def sum_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounded: bool = False) -> Tensor:
        """The norm of `residual + x`, x summed over the ranks, after `residual += x` in place; x may be `Parts`. As
        `rmsnorm` if `rounded`."""
        own, out = Own.of(x), Rounded.room(*residual.shape, like=residual, rounded=rounded)
        if _is_few(residual) and len(residual) <= PROGRAMS and residual.shape[1] <= 2 * WORDS:
            return sum_add_rmsnorm(own, residual, weight, eps, self._few, out)
        return rows.sum_add_rmsnorm(own, residual, weight, eps, self._many, out)


def _is_few(x: Tensor) -> bool:
    return x.numel() * x.element_size() <= FEW_BYTES

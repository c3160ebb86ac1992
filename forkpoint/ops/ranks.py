"""The ranks of tensor parallelism, each with a shard of every layer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.ops.exchange import MOST_ROW_BYTES
from forkpoint.platforms.table import traits_of

if TYPE_CHECKING:
    from forkpoint.ops.exchange.rank_exchange import RankExchange

# environment variables that choose the network interface
LOOPBACK: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Ranks:
    """One of `size` ranks. All ranks call the same methods in the same order.

    Layers whose input is sharded all-reduce their outputs. With `gathers` they all-gather the input instead; one rank
    then computes each output element in the same order as a single device.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        gathers: bool = False,
        exchange: RankExchange | None = None,
        group: dist.ProcessGroup | None = None,
        context: Ranks | None = None,
    ) -> None:
        """`exchange` carries out exchanges that our kernels support. `group` is torch's; None: all ranks.

        `context` are the ranks, this one included, that keep the tokens of the same KV heads in turn.
        """
        self.rank, self.size, self.gathers, self._exchange, self._group = rank, size, gathers, exchange, group
        self._context = context

    @property
    def context(self) -> Ranks:
        """The ranks that keep the tokens of the same KV heads in turn, this one among them; by default it is alone."""
        return self._context or ALONE

    @classmethod
    def meet(
        cls,
        backend: str,
        rank: int,
        size: int,
        place: Path,
        gathers: bool,
        device: torch.device,
        context_size: int = 1,
    ) -> Ranks:
        """Meet the other ranks through `place`, a file that does not exist yet, and wait for all of them.

        `backend` is torch.distributed's, kept to the loopback interface by default. Devices that reach each other's
        memory also get the kernels' exchanges. `context_size` neighbouring ranks keep tokens in turn.
        """
        for name in LOOPBACK:
            os.environ.setdefault(name, "lo")  # all ranks are on this machine, and nobody else may listen
        dist.init_process_group(backend, init_method=place.as_uri(), rank=rank, world_size=size)
        exchange: RankExchange | None = None
        if cls(rank, size).least(traits_of(device).reaches_peers, device):
            from forkpoint.ops.exchange.rank_exchange import RankExchange  # imported late, because it needs Triton

            exchange = RankExchange.meet(rank, size, device)
        context: Ranks | None = None
        if 1 < context_size == size:
            context = cls(rank, size, gathers, exchange)
        elif context_size > 1:
            # Every rank has to create every group.
            groups = [
                dist.new_group(list(range(first, first + context_size))) for first in range(0, size, context_size)
            ]
            own, place_in_group = divmod(rank, context_size)
            context = cls(place_in_group, context_size, gathers, group=groups[own])
        return cls(rank, size, gathers, exchange, context=context)

    @property
    def defers(self) -> bool:
        """Whether all-reduces can be left to the norm that follows them."""
        return self.size > 1 and not self.gathers

    def cuts_rows(self, num_rows: int) -> bool:
        """Return whether a layer with a sharded input also shards its `num_rows` outputs."""
        return self.gathers and num_rows % self.size == 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which may be overwritten."""
        if self.size == 1:
            return x
        if self._exchange is not None and x.dtype == torch.bfloat16 and self._exchange.takes(x):
            return self._exchange.sum(x)
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def takes_parts(self, width: int, dtype: torch.dtype) -> bool:
        """Return whether rows of this width that ranks add or gather may be `Parts`."""
        return self._exchange is not None and self._exchange.takes_parts(width, dtype)

    def norms_sums(self, width: int, dtype: torch.dtype) -> bool:
        """Return whether one kernel computes the all-reduce of rows of this width and the norm that follows."""
        return self.defers and self.takes_parts(width, dtype)

    def sum_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounded: bool) -> Tensor:
        """Add the all-reduced x to the residual in place; return the norm of the residual. Needs `norms_sums`.

        With `rounded`, the norm also carries its FP8 form."""
        assert self._exchange is not None
        return self._exchange.sum_add_rmsnorm(x, residual, weight, eps, rounded)

    def gathers_at_once(self, x: Tensor) -> bool:
        """Return whether `gather(x)` is one kernel."""
        return self._exchange is not None and self._exchange.gathers(x)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors: `x[..., K] -> [..., size * K]`. `Parts` need `takes_parts`."""
        if self.size == 1:
            return x
        if self._exchange is not None and self.gathers_at_once(x):
            return self._exchange.gather(x)
        return self.stack(x).movedim(0, -2).flatten(-2)

    def gather_heads(self, q: Tensor) -> Tensor:
        """Gather the ranks' queries `q[N, H, D]` as `[M, size, G, D]`, where G divides H and M * G is N * H.

        `merge_heads` takes heads in this order.
        """
        heads, dim = q.shape[1:]
        row_bytes = dim * q.element_size()
        group = next(size for size in range(heads, 0, -1) if not heads % size and size * row_bytes <= MOST_ROW_BYTES)
        return self.gather(q.reshape(-1, group * dim)).view(-1, self.size, group, dim)

    def merge_heads(self, parts: Tensor, like: Tensor) -> Tensor:
        """Merge what all ranks have found for this rank's heads: `parts[M, size, G, D + 1]` in fp32 -> `[M, G, D]`.

        `parts[:, r]` goes to rank r. A head's numbers are followed by the logarithm of its sum of exponentials. The
        result has the dtype of `like`."""
        if self._exchange is not None and self._exchange.merges(parts):
            out = like.new_empty(len(parts), parts.shape[2], parts.shape[3] - 1)
            return self._exchange.merge(parts, out)
        found = self.stack(parts)[:, :, self.rank]
        merged: Tensor = (found[..., :-1] * found[..., -1:].softmax(dim=0)).sum(dim=0)
        return merged.to(like.dtype)

    def check_equal(self, named: Mapping[str, object], device: torch.device) -> None:
        """Raise a ConfigError that names each value whose `repr` differs between ranks."""
        if self.size == 1:
            return
        digests = [hashlib.blake2b(repr(value).encode(), digest_size=8).digest() for value in named.values()]
        own = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], device=device)
        for rank, others in enumerate(self.stack(own).tolist()):
            wrong = [name for name, ours, theirs in zip(named, own.tolist(), others, strict=True) if ours != theirs]
            if wrong:
                raise ConfigError(f"ranks {self.rank} and {rank} do not have the same {' and '.join(wrong)}")

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of all ranks' values."""
        if self.size == 1:
            return value
        return int(self.stack(torch.tensor([value], device=device)).min())

    def stack(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, `[size, ...]`."""
        out = x.new_empty(self.size, *x.shape)
        # One call, whose name depends on the version of torch.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(out.flatten(0, 1), x.contiguous(), group=self._group)
        return out


ALONE = Ranks()

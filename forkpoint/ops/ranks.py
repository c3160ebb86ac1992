"""Ranks that run one model together, each with a share of every layer."""

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
from forkpoint.platforms.table import traits_of

if TYPE_CHECKING:
    from forkpoint.ops.exchange.peers import Peers

LOOPBACK: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what they read which interface to use from


class Ranks:
    """One of `size` ranks; all call the same methods in the same order.

    Layers whose input is cut add up what the ranks made of their shares, or, with `gathers`, put the shares of the
    input together: an element is then computed by one rank, in the order in which a single one does it.
    """

    def __init__(self, rank: int = 0, size: int = 1, gathers: bool = False, peers: Peers | None = None) -> None:
        """`peers` make the small exchanges."""
        self.rank, self.size, self.gathers, self._peers = rank, size, gathers, peers

    @classmethod
    def meet(cls, backend: str, rank: int, size: int, place: Path, gathers: bool, device: torch.device) -> Ranks:
        """Wait for the other ranks at `place`, a file that is not there yet; `backend` is torch.distributed's."""
        for name in LOOPBACK:
            os.environ.setdefault(name, "lo")  # all are on this machine, and nobody else is to hear them
        dist.init_process_group(backend, init_method=place.as_uri(), rank=rank, world_size=size)
        ranks = cls(rank, size, gathers)
        if not ranks.least(traits_of(device).reaches_peers, device):
            return ranks
        from forkpoint.ops.exchange.peers import Peers  # needs Triton

        return cls(rank, size, gathers, Peers.meet(rank, size, device))

    @property
    def defers(self) -> bool:
        """Whether sums can be left to the norm behind them."""
        return self.size > 1 and not self.gathers

    def cuts_rows(self, num_rows: int) -> bool:
        """Whether outputs of a layer that takes in what was cut are cut too."""
        return self.gathers and num_rows % self.size == 0

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks; `x` may be overwritten."""
        if self.size == 1:
            return x
        if self._peers is not None and x.dtype == torch.bfloat16 and self._peers.takes(x):
            return self._peers.sum(x)
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def takes_parts(self, width: int, dtype: torch.dtype) -> bool:
        """Whether rows of this width that ranks add up or gather may be `Parts`."""
        return self._peers is not None and self._peers.takes_parts(width, dtype)

    def norms_sums(self, width: int, dtype: torch.dtype) -> bool:
        """Whether one kernel makes sums of rows of this width, and the norms behind them."""
        return self.defers and self.takes_parts(width, dtype)

    def sum_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounded: bool) -> Tensor:
        """The norm of `residual + sum(x)`, after `residual += sum(x)` in place, where `norms_sums` holds; in FP8 too if
        `rounded`."""
        assert self._peers is not None
        return self._peers.sum_add_rmsnorm(x, residual, weight, eps, rounded)

    def gathers_at_once(self, x: Tensor) -> bool:
        """Whether `gather` of x is one kernel."""
        return self._peers is not None and self._peers.gathers(x)

    def gather(self, x: Tensor) -> Tensor:
        """`x[..., K] -> [..., size * K]`: the ranks' tensors side by side; `Parts` only where `takes_parts` holds."""
        if self.size == 1:
            return x
        if self._peers is not None and self.gathers_at_once(x):
            return self._peers.gather(x)
        return self._stacked(x).movedim(0, -2).flatten(-2)

    def check_equal(self, named: Mapping[str, object], device: torch.device) -> None:
        """Raises ConfigError that names what is not the same on all ranks, by its `repr`."""
        digests = [hashlib.blake2b(repr(value).encode(), digest_size=8).digest() for value in named.values()]
        own = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], device=device)
        for rank, others in enumerate(self._stacked(own).tolist() if self.size > 1 else ()):
            wrong = [name for name, ours, theirs in zip(named, own.tolist(), others, strict=True) if ours != theirs]
            if wrong:
                raise ConfigError(f"ranks {self.rank} and {rank} do not have the same {' and '.join(wrong)}")

    def least(self, value: int, device: torch.device) -> int:
        """Of all ranks' values."""
        return int(self._stacked(torch.tensor([value], device=device)).min()) if self.size > 1 else value

    def _stacked(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        # One call, by its newer name or its older.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(out.flatten(0, 1), x.contiguous())
        return out


ALONE = Ranks()

"""Rows of tables that stay in the host's memory, looked up by ids that the device has, in torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HostRows(NamedTuple):
    """Tables `[N_i, D]`, whose rows follow each other. Table i has the ids from `first[i]` on."""

    tables: list[Tensor]
    first: Tensor  # one more than there are tables


def prepare_host_rows(tables: Iterable[Tensor], device: torch.device) -> HostRows:
    """Keep the tables in the host's memory, one after the other. `device` is that of the ids."""
    kept = [table.cpu() for table in tables]
    return HostRows(kept, torch.tensor([0, *accumulate(map(len, kept))]).cpu())


def host_rows(rows: HostRows, ids: Tensor) -> Tensor:
    """Return the rows `[T, S, D]` of `ids[T, S]` int64, on the device of the ids."""
    wanted, tables = ids.cpu().flatten(), rows.tables
    if len(tables) == 1:
        found = F.embedding(wanted, tables[0])
    else:
        found = tables[0].new_empty(len(wanted), tables[0].shape[1])
        places = torch.bucketize(wanted, rows.first, right=True) - 1
        for i in sorted(set(places.tolist())):
            at = places == i
            found[at] = tables[i][wanted[at] - rows.first[i]]
    return found.to(ids.device).view(*ids.shape, -1)

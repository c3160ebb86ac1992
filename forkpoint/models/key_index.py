"""The index by which attention chooses the keys of each query.

The index has one key for each pool of consecutive tokens, stored in the block next to the tokens' keys and values. The
inputs of the pool that is not complete yet are a state of the sequence. Every rank computes the same index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import TensorSpec
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ModelFolderError
from forkpoint.models.config import Build
from forkpoint.models.context import ForwardContext
from forkpoint.models.fields import Fields
from forkpoint.ops.parameters import PoolRule

# operators of layers with an index, which wait for the device in torch
POOL_OPERATORS: Final = ("choose_pools", "pool_attention", "store_rows", "window_prefill", "window_update")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The index of a layer: `num_heads` query heads of `dim`, and the pools that they choose by `rule`."""

    num_heads: int
    dim: int
    rule: PoolRule

    @classmethod
    def of(cls, fields: Fields, num_heads: int, dim: int, size: int, num_tokens: int) -> IndexConfig:
        """Create the config of an index that chooses `num_tokens` tokens in pools of `size`.

        Raises ModelFolderError for sizes that do not divide each other.
        """
        if num_tokens % size or BLOCK_SIZE % size or dim % size:
            raise ModelFolderError(
                f"{fields.where}: pools of {size} keys, of which {num_tokens} are chosen, with index heads of {dim}; "
                f"the size of a pool must divide both, and the {BLOCK_SIZE} tokens of a block"
            )
        return cls(num_heads=num_heads, dim=dim, rule=PoolRule(size, num_tokens // size))

    def kept(self, dtype: str) -> TensorSpec:
        """Return the spec of a block's index keys: one of `dim` for each pool, divided among the pool's tokens."""
        return TensorSpec("index", (1, self.dim // self.rule.size), dtype)

    @property
    def flops_per_pair(self) -> int:
        """The operations for one query token and one key token, without the bounded attention to chosen keys."""
        return 2 * self.num_heads * self.dim // self.rule.size


class PoolKeys:
    """The stored index keys of layer `layer`."""

    def __init__(self, build: Build, layer: int, rule: PoolRule) -> None:
        self._ops, self._layer, self._rule = build.ops, layer, rule

    def write(self, keys: Tensor, ctx: ForwardContext) -> None:
        """Store the index keys `[T, D]`, each of the pool that ends with its token. Other tokens' keys are not used."""
        size, places, cache = self._rule.size, ctx.attention.key_places, ctx.caches[self._layer]["index"]
        last = (places >= 0) & (places % size == size - 1)
        by_pool = cache.view(len(cache), 1, -1, keys.shape[1])  # a block's keys follow each other
        self._ops.store_rows(keys.unsqueeze(1), by_pool, torch.where(last, places // size, -1))

    def choose(self, queries: Tensor, weights: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the pools that each token attends to: see `table.ChoosePools`."""
        cache = ctx.caches[self._layer]["index"]
        return self._ops.choose_pools(queries, weights, cache, ctx.attention, self._rule)

"""Gated delta net (Yang et al. 2024): the gated delta rule with one decay for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkpoint.models.config import Build
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cut, rows
from forkpoint.models.fields import Fields
from forkpoint.models.joints import join_rows
from forkpoint.models.layers import Projection
from forkpoint.models.recurrence import Project, RecurrentConfig
from forkpoint.ops.linear.packed import PackedMatrix
from forkpoint.ops.linear.scaled import Matrix, take_rows
from forkpoint.ops.parameters import Recurrence


@dataclass(frozen=True, kw_only=True)
class GDNConfig(RecurrentConfig):
    """One layer's gated delta net.

    `wide` are the weight names of q, k, v and the gate. `narrow` are the weight names of b and a, which FP8 models may
    store unquantised. If there are several names, the last ones have one part each and the first has all others. A
    single name has all parts, one key head after another. Without names in `narrow`, the single name in `wide` has all
    six parts, one after another.
    """

    wide: tuple[str, ...]
    narrow: tuple[str, ...]
    name: str = "linear_attn"

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> GDNConfig:
        """Read the field names of transformers' families; `style` sets what config.json does not contain.

        Raises as Fields does.
        """
        heads = fields.integer("num_attention_heads")
        key_heads = fields.integer("linear_num_key_heads", heads)
        value_heads = fields.multiple("linear_num_value_heads", key_heads, "linear key heads", heads)
        key_dim = fields.integer("linear_key_head_dim", max(1, int(0.75 * fields.integer("hidden_size") / key_heads)))
        value_dim = fields.integer("linear_value_head_dim", 2 * key_dim)
        negative = "linear_allow_neg_eigval" in fields.values and fields.flag("linear_allow_neg_eigval", True)
        spec = Recurrence(key_heads, value_heads, key_dim, value_dim, negative)
        return cls(spec=spec, conv_width=fields.integer("linear_conv_kernel_dim", 4, low=2), **style)

    def project(self, build: Build, name: str) -> Project:
        spec, ops = self.spec, build.ops
        group = spec.num_v_heads // spec.num_k_heads
        values = group * spec.value_dim
        if self.narrow:
            matrices = [
                self._read(build, name, self.wide, [spec.key_dim, spec.key_dim, values, values]),
                self._read(build, name, self.narrow, [group, group]),
            ]
        else:
            heads = spec.num_v_heads
            parts = Cut(0, (*self.conv_cut.sections, *rows(self.inner, heads, heads).sections))
            matrices = [join_rows(build.weights, {f"{name}.{self.wide[0]}": parts}, build.config.hidden_size)]
        plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
        # Matrices that are unquantised, or in 4 bits, are multiplied as one.
        if len(plain) == 2:
            matrices = [torch.cat(plain)]
        elif len(packed) == 2 and packed[0].joins(packed[1]):
            matrices = [packed[0].joined(packed[1])]
        products = [Projection(ops, matrix) for matrix in matrices]
        sizes = [spec.mixed_dim, self.inner, spec.num_v_heads, spec.num_v_heads]

        def project(x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            if len(products) == 1:
                mixed, z, b, a = torch.split(products[0](x), sizes, dim=-1)
                return mixed, a, b, z
            both = ops.linear_both(x, *(product.packed for product in products)) if ops.linear_both else None
            wide, narrow = both or [product(x) for product in products]
            (mixed, z), (b, a) = torch.split(wide, sizes[:2], dim=-1), torch.split(narrow, sizes[2:], dim=-1)
            return mixed, a, b, z

        return project

    def _read(self, build: Build, name: str, names: Sequence[str], sizes: Sequence[int]) -> Matrix:
        """Read the rows of several parts, one part after another. `sizes` are each part's rows for one key head."""
        heads, others = self.spec.num_k_heads, len(sizes) - len(names) + 1
        first = [heads * size for size in sizes[:others]] if len(names) > 1 else [heads * sum(sizes)]
        parts = zip(names, (first, *([heads * size] for size in sizes[others:])), strict=True)
        named = {f"{name}.{part}": rows(*counts) for part, counts in parts}
        joined = join_rows(build.weights, named, build.config.hidden_size)
        if len(names) > 1:
            return joined
        order = torch.arange(heads * sum(sizes)).view(heads, -1)
        return take_rows(joined, torch.cat([part.flatten() for part in torch.split(order, list(sizes), dim=1)]))


def layer_types(fields: Fields) -> list[str]:
    """Return `linear_attention` or `full_attention` for each layer.

    Without a list in config.json every `full_attention_interval`-th is `full_attention`. Raises as Fields does.
    """
    every = fields.integer("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return fields.layer_types(kinds, lambda i: kinds[(i + 1) % every == 0])

"""The recurrent layer: projection, short convolution, gated delta rule, gated norm, projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forkpoint.cache.layout import LayerSpec
from forkpoint.models.config import Block, Build, PartConfig
from forkpoint.models.cuts import Cuts, inward, rows, share
from forkpoint.models.fields import Fields
from forkpoint.models.layers import Projection, RMSNorm, RowParallel
from forkpoint.models.recurrence import DUMMY_A_LOG, DUMMY_DT_BIAS, ConvRecurrence, gated_heads, kept_state
from forkpoint.ops.linear.scaled import Matrix
from forkpoint.ops.parameters import Recurrence, RecurrenceParams
from forkpoint.ops.ranks import Ranks

ReadInput: TypeAlias = Callable[["Build", str, "GDNConfig"], tuple[Matrix, Matrix]]
ReadConv: TypeAlias = Callable[["Build", str, "GDNConfig"], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNConfig(PartConfig):
    """One layer's recurrence, and how its family names and lays out the weights.

    `read_input(build, name, config)` returns `[mixed_dim + HV*V, hidden]`, rows `[q | k | v | z]`, and
    `[2*HV, hidden]`, rows `[b | a]`, which models in FP8 may leave as they were;
    `read_conv(build, name, config)` returns `[mixed_dim, W]`.
    """

    shape: Recurrence
    conv_width: int
    read_input: ReadInput
    read_conv: ReadConv
    name: str = "linear_attn"
    norm: str = "norm"
    out: str = "out_proj"
    norm_eps: float | None = None  # None: the model's

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> GDNConfig:
        """Under the names of transformers' families; `style` gives what config.json does not say."""
        heads = fields.integer("num_attention_heads")
        key_heads = fields.integer("linear_num_key_heads", heads)
        value_heads = fields.multiple("linear_num_value_heads", key_heads, "linear key heads", heads)
        key_dim = fields.integer("linear_key_head_dim", max(1, int(0.75 * fields.integer("hidden_size") / key_heads)))
        value_dim = fields.integer("linear_value_head_dim", 2 * key_dim)
        negative = "linear_allow_neg_eigval" in fields.values and fields.flag("linear_allow_neg_eigval", True)
        shape = Recurrence(key_heads, value_heads, key_dim, value_dim, negative)
        return cls(shape=shape, conv_width=fields.integer("linear_conv_kernel_dim", 4, low=2), **style)

    @property
    def value_size(self) -> int:
        return self.shape.num_v_heads * self.shape.value_dim

    def build(self, build: Build, name: str, layer: int) -> Block:
        shape, ops, weights = self.shape, build.ops, build.weights
        matrices = self.read_input(build, name, self)
        plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        # One product where both are plain.
        products = [Projection(ops, m) for m in ([torch.cat(plain)] if len(plain) == 2 else matrices)]
        taps = self.read_conv(build, name, self)
        heads, fp32 = (shape.num_v_heads,), torch.float32
        a_log = weights.get(f"{name}.A_log", heads, fp32, DUMMY_A_LOG)
        dt_bias = weights.get(f"{name}.dt_bias", heads, fp32, DUMMY_DT_BIAS)
        recurrence = ConvRecurrence(ops, layer, taps, None, RecurrenceParams(shape, a_log, dt_bias))
        sizes = [shape.mixed_dim, self.value_size, shape.num_v_heads, shape.num_v_heads]

        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            if len(products) == 1:
                mixed, z, b, a = torch.split(products[0](x), sizes, dim=-1)
                return mixed, a, b, z
            both = ops.linear_both(x, *(product.packed for product in products)) if ops.linear_both else None
            wide, narrow = both or [product(x) for product in products]
            (mixed, z), (b, a) = torch.split(wide, sizes[:2], dim=-1), torch.split(narrow, sizes[2:], dim=-1)
            return mixed, a, b, z

        norm = RMSNorm(build, f"{name}.{self.norm}", shape.value_dim, centred=False, eps=self.norm_eps)
        out = RowParallel(build, f"{name}.{self.out}", build.config.hidden_size, self.value_size)
        return gated_heads(recurrence, ops, project, norm, out)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (kept_state(self.shape, self.conv_width, dtype, state_dtype),)

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[GDNConfig, Cuts]:
        shape = self.shape
        group = shape.num_v_heads // shape.num_k_heads
        keys, values = (shape.num_k_heads, shape.key_dim), (shape.num_v_heads, shape.value_dim)
        heads = (shape.num_v_heads, 1)
        mixed = rows(keys, keys, values)
        cuts = {
            "in_proj_qkvz": rows((shape.num_k_heads, 2 * (shape.key_dim + group * shape.value_dim))),
            "in_proj_ba": rows((shape.num_k_heads, 2 * group)),
            **dict.fromkeys(("in_proj_qkv", "conv1d"), mixed),
            **dict.fromkeys(("q_proj", "k_proj"), rows(keys)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), rows(values)),
            **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), rows(heads)),
        }
        num_keys = share(shape.num_k_heads, "linear key heads", ranks)
        own = replace(self, shape=replace(shape, num_k_heads=num_keys, num_v_heads=num_keys * group))
        return own, cuts | inward(self.out, hidden_size, ranks)

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.shape.mixed_dim + 2 * self.value_size + 2 * self.shape.num_v_heads)


def read_conv(build: Build, name: str, config: GDNConfig) -> Tensor:
    """`name.conv1d.weight` as `[mixed_dim, W]`."""
    return build.weights.get(f"{name}.conv1d.weight", (config.shape.mixed_dim, 1, config.conv_width)).squeeze(1)


def layer_types(fields: Fields) -> list[str]:
    """`linear_attention` or `full_attention` of each layer, the latter every few layers where nothing is listed."""
    every = fields.integer("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return fields.layer_types(kinds, lambda i: kinds[(i + 1) % every == 0])

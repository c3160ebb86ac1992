"""Mamba-2 (Dao and Gu 2024): projection, short convolution, state-space recurrence, gated norm over groups, projection.

Also the models that consist of such layers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cut, share, sharing
from forkpoint.models.fields import Fields
from forkpoint.models.layers import RowParallel, join_projections
from forkpoint.models.mamba import MambaModel
from forkpoint.models.recurrence import Project, RecurrentConfig, read_group_norm
from forkpoint.ops.parameters import Recurrence
from forkpoint.ops.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """One layer's Mamba-2 recurrence: q is C, k is B, v is x. Its groups are those of the norm.

    `norm`: apply the norm after the gate, before it, or not at all. `scales` multiply the projection's rows of z, x, B,
    C and dt.
    """

    conv_bias: bool = True
    bias: bool = False
    norm: Literal["after", "before"] | None = "after"
    sharing: int = 1  # number of ranks that hold the same groups; the norm then spans these ranks
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0
    name: str = "mamba"

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> Mamba2Config:
        """Read the names that most config.json use; `style` sets what they do not contain. Raises as Fields does."""
        fields.require("hidden_act", "silu", "swish")
        groups = fields.integer("mamba_n_groups")
        heads = fields.multiple("mamba_n_heads", groups, "mamba groups")
        inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * fields.integer("hidden_size"))
        dim = fields.integer_or_auto("mamba_d_head", inner // heads)
        if fields.values.get("mamba_d_ssm") is not None and heads * dim != inner:
            raise ModelFolderError(
                f"{fields.where} has mamba_d_ssm={inner}, which is not mamba_n_heads={heads} times mamba_d_head={dim}"
            )
        spec = Recurrence(
            groups,
            heads,
            fields.integer("mamba_d_state"),
            dim,
            delta=False,
            step_limit=fields.limits("time_step_limit"),
        )
        style = {"norm_eps": fields.real("rms_norm_eps"), **style}
        return cls(
            spec=spec,
            conv_width=fields.integer("mamba_d_conv", 4, low=2),
            conv_bias=fields.flag("mamba_conv_bias", True),
            bias=fields.flag("mamba_proj_bias", False),
            **style,
        )

    def project(self, build: Build, name: str) -> Project:
        """Read rows stored as `[z | x | B | C | dt]` into rows `[C | B | x | z | dt]`, scaled."""
        spec, inner, heads = self.spec, self.inner, self.spec.num_v_heads
        z, dt = torch.arange(inner), torch.arange(heads) + inner + spec.mixed_dim
        parts = [z, *self._xbc(inner), dt]
        order, scale = torch.cat([*parts[3:0:-1], z, dt]), None
        if any(by != 1.0 for by in self.scales):
            scale = torch.cat([torch.full((len(part),), by) for part, by in zip(parts, self.scales, strict=True)])
        rows = {"in": Cut(0, ((inner, 1), *self.conv_cut.sections, (heads, 1)))}
        product = join_projections(build, name, rows, build.config.hidden_size, self.bias, scale, order)

        def project(x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, None, Tensor]:
            mixed, z, dt = torch.split(product(x), [spec.mixed_dim, inner, heads], dim=-1)
            return mixed, dt, None, z

        return project

    @property
    def conv_cut(self) -> Cut:
        keys = (self.spec.num_k_heads * self.spec.key_dim, self.sharing)
        return Cut(0, ((self.inner, 1), keys, keys))

    def _xbc(self, start: int) -> list[Tensor]:
        """Return the row indices of x, B and C, where x starts at `start`."""
        keys = self.spec.num_k_heads * self.spec.key_dim
        rows = torch.arange(self.spec.mixed_dim) + start
        return list(torch.split(rows, [self.inner, keys, keys]))

    def taps(self, build: Build, name: str) -> tuple[Tensor, Tensor | None]:
        """Read rows stored as `[x | B | C]` into rows `[C | B | x]`, with their bias or None."""
        taps, _ = super().taps(build, name)
        order = torch.cat(self._xbc(0)[::-1])
        if not self.conv_bias:
            return taps[order], None
        return taps[order], build.weights.get(f"{name}.conv1d.bias", (len(order),), cut=self.conv_cut)[order]

    def finish(self, build: Build, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        ops = build.ops
        out = RowParallel(build, f"{name}.out_proj", build.config.hidden_size, self.inner, self.bias, self.out_scale)
        if self.norm is None:
            return lambda heads, gate: out(ops.silu_mul(torch.cat((gate, heads.flatten(1)), dim=-1)))
        form = (self.inner, self.spec.num_k_heads, self.sharing, self.norm_eps)
        norm = read_group_norm(build, f"{name}.norm", *form, gate_first=self.norm == "after")
        return lambda heads, gate: out(norm(heads, gate))

    def cut(self, ranks: Ranks) -> Mamba2Config:
        spec = self.spec
        heads = share(spec.num_v_heads, "heads", ranks)
        groups = share(spec.num_k_heads, "groups", ranks, shared=True)
        own = replace(spec, num_k_heads=groups, num_v_heads=heads)
        return replace(self, spec=own, sharing=sharing(spec.num_k_heads, ranks))


class Mamba2(MambaModel):
    architectures: ClassVar = ("Mamba2ForCausalLM",)
    field_names: ClassVar = {
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    config_class: ClassVar = "mamba2.Mamba2Config"
    unneeded_fields: ClassVar = ("intermediate_size", "norm_before_gate", "time_step_rank")

    @classmethod
    def mixer(cls, fields: Fields) -> PartConfig:
        return Mamba2Config.read(fields, name="mixer")

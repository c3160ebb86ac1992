"""Mamba-2's layer: projection, short convolution, state-space recurrence, gated norm over groups, projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from forkpoint.cache.layout import LayerSpec
from forkpoint.models.config import Build, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.cuts import Cuts, inward, rows, share
from forkpoint.models.fields import Fields
from forkpoint.models.layers import Projection, RMSNorm, RowParallel
from forkpoint.models.recurrence import DUMMY_A_LOG, DUMMY_DT_BIAS, ConvRecurrence, kept_state
from forkpoint.ops.linear.scaled import multiplied, take_rows
from forkpoint.ops.parameters import Recurrence, RecurrenceParams
from forkpoint.ops.ranks import Ranks

DUMMY_D = (0.5, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(PartConfig):
    """One layer's recurrence: q is C, k is B, v is x; its groups are those of the norm.

    `norm`: after the gate, before it, or none. `scales` multiply the projection's rows of z, x, B, C and dt.
    """

    spec: Recurrence
    conv_width: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["after", "before"] | None = "after"
    norm_groups: int = 0  # of the norm where each spans several ranks; 0: those of `spec`
    scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0
    name: str = "mamba"

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> Mamba2Config:
        """Under the names of most config.json; `style` gives what they do not say."""
        fields.require("hidden_act", "silu", "swish")
        groups = fields.integer("mamba_n_groups")
        heads = fields.multiple("mamba_n_heads", groups, "mamba groups")
        inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * fields.integer("hidden_size"))
        automatic = fields.values.get("mamba_d_head", "auto") == "auto"
        dim = inner // heads if automatic else fields.integer("mamba_d_head")
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

    @property
    def inner(self) -> int:
        return self.spec.num_v_heads * self.spec.value_dim

    def build(self, build: Build, name: str, layer: int) -> Mamba2Mixer:
        return Mamba2Mixer(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        return (kept_state(self.spec, self.conv_width, dtype, state_dtype),)

    def cut(self, ranks: Ranks, hidden_size: int) -> tuple[Mamba2Config, Cuts]:
        spec = self.spec
        keys, values = (spec.num_k_heads, spec.key_dim), (spec.num_v_heads, spec.value_dim)
        heads = (spec.num_v_heads, 1)
        cuts = {
            "in_proj": rows(values, values, keys, keys, heads),
            "conv1d": rows(values, keys, keys),
            **dict.fromkeys(("A_log", "dt_bias", "D"), rows(heads)),
            **inward("out_proj", hidden_size, ranks),
        }
        num_heads = share(spec.num_v_heads, "heads", ranks)
        groups = share(spec.num_k_heads, "groups", ranks, shared=True)
        norm_groups = 0
        if spec.num_k_heads % ranks.size:
            norm_groups = spec.num_k_heads  # of which each spans several ranks
        else:
            cuts[f"{self.name}.norm"] = rows(values)
        own = replace(spec, num_k_heads=groups, num_v_heads=num_heads)
        return replace(self, spec=own, norm_groups=norm_groups), cuts

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.spec.mixed_dim + 2 * self.inner + self.spec.num_v_heads)


class Mamba2Mixer:
    """The recurrence of layer `layer`."""

    def __init__(self, build: Build, name: str, layer: int, config: Mamba2Config) -> None:
        self._ops, self._config, self._ranks = build.ops, config, build.ranks
        spec, weights, fp32 = config.spec, build.weights, torch.float32
        self._input = self._read_input(build, name)
        order = torch.cat(self._xbc(0)[::-1])
        taps = weights.get(f"{name}.conv1d.weight", (spec.mixed_dim, 1, config.conv_width)).squeeze(1)[order]
        bias = weights.get(f"{name}.conv1d.bias", (spec.mixed_dim,))[order] if config.conv_bias else None
        heads = (spec.num_v_heads,)
        params = RecurrenceParams(
            spec,
            weights.get(f"{name}.A_log", heads, fp32, DUMMY_A_LOG),
            weights.get(f"{name}.dt_bias", heads, fp32, DUMMY_DT_BIAS),
            weights.get(f"{name}.D", heads, fp32, DUMMY_D),
        )
        self._recurrence = ConvRecurrence(build.ops, layer, taps, bias, params)
        self._norm: Tensor | None = None
        if config.norm is not None:
            size = config.inner * (build.ranks.size if config.norm_groups else 1)
            norm = RMSNorm(build, f"{name}.norm", size, centred=False)
            self._norm = norm.weight.view(config.norm_groups or spec.num_k_heads, -1)
        self._out = RowParallel(
            build, f"{name}.out_proj", build.config.hidden_size, config.inner, config.bias, config.out_scale
        )

    def _xbc(self, start: int) -> list[Tensor]:
        """Rows of x, B and C where x starts at `start`."""
        keys = self._config.spec.num_k_heads * self._config.spec.key_dim
        rows = torch.arange(self._config.spec.mixed_dim) + start
        return list(torch.split(rows, [self._config.inner, keys, keys]))

    def _read_input(self, build: Build, name: str) -> Projection:
        """Rows `[C | B | x | z | dt]` of those stored as `[z | x | B | C | dt]`, scaled."""
        config, spec = self._config, self._config.spec
        inner, heads = config.inner, spec.num_v_heads
        z, dt = torch.arange(inner), torch.arange(heads) + inner + spec.mixed_dim
        parts = [z, *self._xbc(inner), dt]
        rows = inner + spec.mixed_dim + heads
        scale = torch.cat([torch.full((len(part),), by) for part, by in zip(parts, config.scales, strict=True)])
        order = torch.cat([*parts[3:0:-1], z, dt])
        weight = build.weights.get_matrix(f"{name}.in_proj.weight", (rows, build.config.hidden_size))
        bias = build.weights.get(f"{name}.in_proj.bias", (rows,)) if config.bias else None
        if any(by != 1.0 for by in config.scales):
            weight = multiplied(weight, scale.unsqueeze(1))
            bias = None if bias is None else (bias.float() * scale).to(bias.dtype)
        return Projection(build.ops, take_rows(weight, order), None if bias is None else bias[order])

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`x[T, H] -> [T, H]`; reads and writes the slots that `ctx` names."""
        config, spec = self._config, self._config.spec
        mixed, z, dt = torch.split(self._input(x), [spec.mixed_dim, config.inner, spec.num_v_heads], dim=-1)
        out = self._recurrence(mixed, dt, None, ctx).flatten(1)
        if self._norm is None:
            return self._out(self._ops.silu_mul(torch.cat((z, out), dim=-1)))
        groups = (config.norm_groups or spec.num_k_heads, -1)
        if config.norm_groups:
            out, z = self._ranks.gather(out), self._ranks.gather(z)
        out, gate = torch.unflatten(out, -1, groups), torch.unflatten(z, -1, groups)
        first = config.norm == "after"
        out = self._ops.gated_rmsnorm(out, gate, self._norm, config.norm_eps, first).flatten(1)
        if config.norm_groups:
            out = out.narrow(1, self._ranks.rank * config.inner, config.inner)
        return self._out(out)

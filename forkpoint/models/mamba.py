"""Mamba-1 layers (selective scan, Gu and Dao 2023), and the models that consist of such layers only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import LayerSpec, Recording, StateSpec, TensorSpec
from forkpoint.models.config import Build, ModelConfig, PartConfig
from forkpoint.models.context import ForwardContext
from forkpoint.models.convolution import CONV, Convolution, kept_window
from forkpoint.models.cuts import ROWS, rows, share
from forkpoint.models.decoder import BACKBONE, Model
from forkpoint.models.fields import Fields
from forkpoint.models.layers import RMSNorm, RowParallel, read_projection
from forkpoint.models.recurrence import DUMMY_A_LOG, DUMMY_D, DUMMY_DT_BIAS
from forkpoint.ops.parameters import ScanInputs, ScanParams
from forkpoint.ops.ranks import Ranks

SCAN: Final = "scan"  # name of the state
SCAN_OPERATIONS: Final = 7  # operations of the scan for each token and state value
UNLIMITED: Final = 1 << 20  # max_model_len of a model without positions


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(PartConfig):
    """One layer's selective scan over `channels` channels with `values` state values each.

    `norms`: the step, b and c are normalised, with weights. With `norm_eps` they are normalised without weights.
    `bias`: the projections have biases. `rank` is the width of the step before `dt_proj`.
    """

    channels: int
    values: int
    rank: int
    conv_width: int
    conv_bias: bool
    bias: bool
    norms: bool = False
    norm_eps: float | None = None
    name: str = "mixer"

    @classmethod
    def read(cls, fields: Fields, **style: Any) -> MambaConfig:
        """Read the field names of Mamba's own config.json; `style` sets what it does not contain.

        Raises as Fields does.
        """
        fields.require("hidden_act", "silu")
        hidden = fields.integer("hidden_size")
        style = {"channels": fields.integer("intermediate_size", fields.integer("expand", 2) * hidden), **style}
        return cls(
            values=fields.integer("state_size", 16),
            rank=fields.integer_or_auto("time_step_rank", -(-hidden // 16)),
            conv_width=fields.integer("conv_kernel", 4, low=2),
            conv_bias=fields.flag("use_conv_bias", True),
            bias=fields.flag("use_bias", False),
            **style,
        )

    def build(self, build: Build, name: str, layer: int) -> Mamba:
        return Mamba(build, name, layer, self)

    def kept(self, dtype: str, state_dtype: str) -> LayerSpec:
        """Return the spec of the stored state: the convolution's window and the state of all channels."""
        state = (self.channels, self.values)
        values, steps = (TensorSpec(name, (self.channels,), dtype, single=True) for name in ("values", "steps"))
        drafts = Recording("scan_verify", "scan_fold", (values, steps, TensorSpec("keys", (self.values,), dtype)))
        tensors = (
            kept_window(self.channels, self.conv_width, dtype),
            TensorSpec(SCAN, state, state_dtype, ("scan_decode", "scan_prefill"), drafts),
        )
        return (StateSpec(tensors, SCAN_OPERATIONS * math.prod(state)),)

    def cut(self, ranks: Ranks) -> MambaConfig:
        return replace(self, channels=share(self.channels, "channels", ranks))

    def num_weights(self, hidden_size: int) -> int:
        return self.channels * (3 * hidden_size + 2 * self.rank + 2 * self.values)


class Mamba:
    """The scan of layer `layer`: projection, short convolution, selection of step, b and c, scan, projection."""

    def __init__(self, build: Build, name: str, layer: int, config: MambaConfig) -> None:
        self._ops, self._config, self._state = build.ops, config, build.state(layer, SCAN)
        get, fp32, hidden = build.weights.get, torch.float32, build.config.hidden_size
        channels, values, rank = config.channels, config.values, config.rank
        into = rows(channels, channels)
        self._input = read_projection(build, f"{name}.in_proj", 2 * channels, hidden, config.bias, cut=into)
        taps = get(f"{name}.conv1d.weight", (channels, 1, config.conv_width), cut=ROWS).squeeze(1)
        bias = build.weights.bias(f"{name}.conv1d", channels, config.conv_bias, ROWS)
        self._conv = Convolution(build.state(layer, CONV), taps, bias)
        self._selection = RowParallel(replace(build, defers=False), f"{name}.x_proj", rank + 2 * values, channels)
        self._step = read_projection(build, f"{name}.dt_proj", channels, rank, cut=ROWS)
        self._params = ScanParams(
            -torch.exp(get(f"{name}.A_log", (channels, values), fp32, DUMMY_A_LOG, ROWS)),
            get(f"{name}.dt_proj.bias", (channels,), fp32, DUMMY_DT_BIAS, ROWS),
            get(f"{name}.D", (channels,), fp32, DUMMY_D, ROWS),
        )
        build.fold_constants[layer, SCAN] = (self._params.A, self._params.dt_bias)
        self._norm_eps, self._norms = config.norm_eps or build.config.rms_norm_eps, list[Tensor]()
        normed = {"dt": rank, "b": values, "c": values}.items()
        if config.norm_eps is not None:
            self._norms = [torch.ones(size) for _, size in normed]
        elif config.norms:
            self._norms = [RMSNorm(build, f"{name}.{part}_layernorm", size, False).weight for part, size in normed]
        self._out = RowParallel(build, f"{name}.out_proj", hidden, channels, config.bias)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Run the layer: `x[T, H] -> [T, H]`. Reads and writes the slots that `ctx` names."""
        config, split = self._config, ctx.num_decodes
        x, z = self._input(x).chunk(2, dim=-1)
        x = self._conv(x, ctx)
        dt, b, c = torch.split(self._selection(x), [config.rank, config.values, config.values], dim=-1)
        if self._norms:
            weighed = zip((dt, b, c), self._norms, strict=True)
            dt, b, c = (self._ops.rmsnorm(part, weight, self._norm_eps) for part, weight in weighed)
        inputs = ScanInputs(x, self._step(dt), b, c, z)
        out = torch.empty_like(x)
        if split:
            operator, args = self._state.decode(ctx)
            operator(ScanInputs(*(value[:split] for value in inputs)), self._params, *args, out[:split])
        if split < x.shape[0]:
            operator, args = self._state.prefill(ctx)
            operator(ScanInputs(*(value[split:] for value in inputs)), self._params, *args, out[split:])
        return self._out(out)


class MambaModel(Model):
    """The family of `MambaForCausalLM`: recurrent layers only."""

    architectures: ClassVar = ("MambaForCausalLM",)
    norms: ClassVar = ("norm",)
    field_names: ClassVar[Mapping[str, str]] = {"layer_norm_epsilon": "rms_norm_eps"}
    config_class: ClassVar = "mamba.MambaConfig"
    defaults: ClassVar = {"max_position_embeddings": UNLIMITED}
    weight_names: ClassVar = BACKBONE

    @classmethod
    def parse(cls, fields: Fields) -> ModelConfig:
        return ModelConfig.of(fields, [(cls.mixer(fields),)] * fields.integer("num_hidden_layers"))

    @classmethod
    def mixer(cls, fields: Fields) -> PartConfig:
        """Return the part that every layer consists of. Raises as Fields does."""
        return MambaConfig.read(fields)


class FalconMamba(MambaModel):
    """The family of `FalconMambaForCausalLM`: step, b and c are normalised without weights."""

    architectures: ClassVar = ("FalconMambaForCausalLM",)
    config_class: ClassVar = "falcon_mamba.FalconMambaConfig"

    @classmethod
    def mixer(cls, fields: Fields) -> PartConfig:
        return MambaConfig.read(fields, norm_eps=fields.real("mixer_rms_eps", 1e-6))

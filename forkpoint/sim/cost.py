"""How long a step takes: a model's work under a device's two ceilings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.errors import ConfigError
from forkpoint.sim.shape import WEIGHT_BYTES, ModelShape


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes.

    Prefill: `prefill_tokens` in `num_segments` chunks, `prefill_pairs` (query, key) pairs. Decode: `num_decodes`
    rows that attend to `decode_kv_tokens` keys together, with `num_drafts` drafts to verify besides their own tokens:
    each attends to all keys before it, and the rows' states are read and written once. `num_saves` states are stored
    besides the rows' own; `copied_bytes` are moved (compaction, or copies of states before the step).
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    num_segments: int = 0
    num_decodes: int = 0
    decode_kv_tokens: int = 0
    num_saves: int = 0
    num_sampled: int = 0
    copied_bytes: int = 0
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes + self.num_drafts


class StepParts(NamedTuple):
    """Seconds of a step by what they go to, at the ceilings (efficiency 1)."""

    linear: float
    attention: float
    decode_attention: float
    prefill_states: float
    decode_states: float
    moved: float


@dataclass(frozen=True, slots=True)
class Device:
    """A device's ceilings, measured, and the share of them that each kind of work reaches.

    `flops` in operations a second, `bandwidth` in bytes a second, `step_s` the time of a step beside its kernels. The
    shares are those that docs/benchmarks/simulator/steps_h200.json gives; one above 1 says that the layers' products
    run faster than the one that the ceiling was measured with.
    """

    name: str
    flops: float
    bandwidth: float
    memory_bytes: float
    linear: float = 1.04
    attention: float = 0.64
    decode_attention: float = 0.86
    prefill_states: float = 0.165
    decode_states: float = 0.77
    moved: float = 0.77
    step_s: float = 0.0008

    def __post_init__(self) -> None:
        bad = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name" and getattr(self, f.name) < 0}
        if bad or not self.flops or not self.bandwidth:
            raise ConfigError(f"device {self.name} has {bad or 'no ceilings'}; rates and shares must be positive")


H200: Final = Device("NVIDIA H200", flops=693e12, bandwidth=4.28e12, memory_bytes=141e9)  # docs/benchmarks/gpu_ops.md
H100: Final = Device("NVIDIA H100", flops=650e12, bandwidth=3.0e12, memory_bytes=80e9)
DEVICES: Final[Mapping[str, Device]] = MappingProxyType({"h200": H200, "h100": H100})


def find_device(name: str) -> Device:
    """The device of that name. Raises ConfigError."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(f"no device {name!r}; give one of {', '.join(DEVICES)}")
    return device


class CostModel:
    """Seconds of a step of one model on one device: each part takes the longer of its operations and bytes."""

    def __init__(self, shape: ModelShape, device: Device) -> None:
        self.shape = shape
        self.device = device

    def parts(self, load: StepLoad) -> StepParts:
        """The step's parts at the ceilings."""
        shape, device, tokens = self.shape, self.device, load.num_tokens
        slot_bytes = shape.layout.slot_bytes
        linear = max(tokens * shape.flops_per_token / device.flops, shape.weight_bytes(tokens) / device.bandwidth)
        if load.num_sampled:
            head = shape.head_weights
            linear += max(2 * head * load.num_sampled / device.flops, head * WEIGHT_BYTES / device.bandwidth)
        stored = (2 * load.num_segments + load.num_saves) * slot_bytes
        return StepParts(
            linear=linear,
            attention=load.prefill_pairs * shape.flops_per_pair / device.flops,
            decode_attention=load.decode_kv_tokens * shape.kv_token_bytes / device.bandwidth,
            prefill_states=load.prefill_tokens * shape.state_flops_per_token / device.flops,
            decode_states=2 * load.num_decodes * slot_bytes / device.bandwidth,
            moved=(tokens * shape.moved_bytes_per_token + stored + 2 * load.copied_bytes) / device.bandwidth,
        )

    def step_s(self, load: StepLoad) -> float:
        """Seconds that the step takes."""
        device = self.device
        seconds = device.step_s
        for name, part in self.parts(load)._asdict().items():  # `sum` adds floats up otherwise from Python 3.12 on
            seconds += part / getattr(device, name)
        return seconds


class MeasuredStep(NamedTuple):
    """A step that ran, and how long it took."""

    load: StepLoad
    seconds: float


def read_steps(path: Path) -> tuple[str, list[MeasuredStep]]:
    """(the model's name, its steps) from a file of `python -m benchmarks.step_times`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = [MeasuredStep(StepLoad(**line["load"]), float(line["seconds"])) for line in content["steps"]]
        return str(content["model"]), steps
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of measured steps: {type(error).__name__}: {error}") from error


def calibrate(model: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """The same model with the device's shares and step time fitted to measured steps.

    Least squares on relative errors, kept positive by leaving the shares of parts out that would turn negative.
    """
    rows = [[*model.parts(step.load), 1.0] for step in steps]
    matrix = np.asarray(rows) / np.asarray([[step.seconds] for step in steps])
    prior = np.asarray([1 / getattr(model.device, name) for name in StepParts._fields] + [model.device.step_s])
    inverse = _fit_positive(matrix, prior)
    shares = dict(zip(StepParts._fields, (1 / inverse[:-1]).tolist(), strict=True))
    return CostModel(model.shape, replace(model.device, **shares, step_s=float(inverse[-1])))


FloatArray: TypeAlias = npt.NDArray[np.float64]


def _fit_positive(matrix: FloatArray, prior: FloatArray) -> FloatArray:
    """Minimise `|matrix @ x - 1|` near `prior` (a weak pull for what the steps do not show), x >= prior / 10."""
    scale = prior.copy()
    pull = 0.02 * np.sqrt(len(matrix))
    full = np.vstack([matrix * scale, pull * np.eye(len(prior))])
    target = np.concatenate([np.ones(len(matrix)), np.full(len(prior), pull)])
    free = np.ones(len(prior), bool)
    x = np.ones(len(prior))
    while free.any():
        x[~free] = 0.1
        x[free] = np.linalg.lstsq(full[:, free], target - full[:, ~free] @ x[~free], rcond=None)[0]
        low = free & (x < 0.1)
        if not low.any():
            break
        free &= ~low
    fitted: FloatArray = np.maximum(x, 0.1) * scale
    return fitted

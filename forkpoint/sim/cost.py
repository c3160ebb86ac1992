"""The cost model: how long a step takes, given the model's work and the device's two ceilings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from forkpoint.sim.shape import WEIGHT_BYTES, ModelShape


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of one step.

    Prefill: `prefill_tokens` in `num_segments` chunks, with `prefill_pairs` (query, key) pairs. Decode: `num_decodes`
    rows that attend to `decode_kv_tokens` keys in total, with `num_drafts` drafts to verify. A draft attends to all
    keys before it; a row's state is read and written once. `num_saves` states are stored in addition to the rows' own,
    and `copied_bytes` are moved by compaction or by copies of states before the step. `host_bytes` go to the tiers
    and come from them.
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
    host_bytes: int = 0
    waits_s: float = 0.0  # seconds that a step without work waits for the disk

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes + self.num_drafts


class StepParts(NamedTuple):
    """Seconds of a step by kind of work, at the ceilings."""

    linear: float
    attention: float
    decode_attention: float
    prefill_states: float
    decode_states: float
    moved: float
    host: float


@dataclass(frozen=True, slots=True)
class Device:
    """A device's measured ceilings, and the share of them that each kind of work reaches.

    `flops` are operations per second, `bandwidth` is bytes per second, `step_s` is the time of a step outside kernels.
    `host_bandwidth`, bytes per second between device and host memory, is an assumption: that of PCIe 5.
    The shares are fitted to docs/benchmarks/simulator/steps_h200.json. A share above 1 means that the layers' products
    run faster than the product that measured the ceiling.
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
    host: float = 1.0
    host_bandwidth: float = 50e9
    step_s: float = 0.0008


H200: Final = Device("NVIDIA H200", flops=693e12, bandwidth=4.28e12, memory_bytes=141e9)  # docs/benchmarks/gpu_ops.md


class CostModel:
    """Predicts the duration of a model's steps on a device. Each part takes the longer of its operations and bytes."""

    def __init__(self, shape: ModelShape, device: Device) -> None:
        self.shape = shape
        self.device = device

    def parts(self, load: StepLoad) -> StepParts:
        """Return the seconds of the step's parts at the ceilings."""
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
            host=load.host_bytes / device.host_bandwidth,
        )

    def step_s(self, load: StepLoad) -> float:
        """Return the duration of the step in seconds: all parts, slower than the ceilings, one after the other."""
        device = self.device
        seconds = device.step_s
        for name, part in self.parts(load)._asdict().items():  # not `sum`, which rounds differently from Python 3.12 on
            seconds += part / getattr(device, name)
        return max(seconds, load.waits_s)

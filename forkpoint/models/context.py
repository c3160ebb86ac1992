"""What a model sees of a step: tensors, never requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, SegmentIndex


@dataclass(frozen=True, slots=True)
class KVCache:
    """One attention layer's share of the arena: `[P, Hkv, 64, D]` strided views."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """One recurrent layer's share of the arena: conv pool `[P, W-1, D]`, matrix pool `[P, HV, V, K]`."""

    conv: Tensor
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class StateIndex:
    """Slots for one kind of state operator, decode rows and prefill segments."""

    decode: DecodeIndex
    prefill: SegmentIndex


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Index tensors and caches of one forward pass over `T` tokens, decode rows first.

    `conv` and `matrix` differ only where an operator cannot redirect and its states were copied beforehand.
    `kv[i]` belongs to the i-th attention layer, `states[i]` to the i-th recurrent layer.
    """

    positions: Tensor  # [T] int64
    num_decodes: int
    attention: AttentionIndex
    conv: StateIndex
    matrix: StateIndex
    kv: tuple[KVCache, ...]
    states: tuple[StateCache, ...]

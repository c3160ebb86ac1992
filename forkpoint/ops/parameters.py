"""What layers give operators beside plain tensors: how a recurrence, a scan or a router computes, norms and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Out: TypeAlias = Tensor | None  # where an answer goes, if not to a tensor of its own
Records: TypeAlias = Sequence[Tensor]  # what a layer's tokens leave, in the order that its operator names them


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a layer's recurrence computes. `mixed` is laid out `[q (H*K) | k (H*K) | v (HV*V)]`.

    A token multiplies a head's state by `e^g`, `g = -exp(A_log) * step`, `step = softplus(a + dt_bias)` within
    `step_limit`, adds `beta v k^T`, and reads `S q`. With the delta rule, what the state has for k is taken from v
    first, q and k are l2-normalised (eps 1e-6 under the root), q scaled by K**-0.5, and `beta = sigmoid(b)`. Without
    it (Mamba-2: q is C, k is B, v is x) they are taken as they are, and `beta = step`.
    """

    num_k_heads: int  # H
    num_v_heads: int  # HV, a multiple of H; value head hv uses q/k head hv // (HV // H)
    key_dim: int  # K
    value_dim: int  # V
    double_beta: bool = False  # beta is 2 sigmoid(b) (OLMo-Hybrid)
    delta: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    per_key: bool = False  # each key dim has a decay of its own (KDA), with the delta rule and H = HV alone
    bound: float | None = None  # of those: g = bound * sigmoid(exp(A_log) (a + dt_bias)) instead

    @property
    def num_decays(self) -> int:
        """Of a token: what `a` has."""
        return self.num_v_heads * (self.key_dim if self.per_key else 1)

    @property
    def mixed_dim(self) -> int:
        return 2 * self.num_k_heads * self.key_dim + self.num_v_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class RecurrenceParams:
    """A layer's recurrence and its constants, fp32 `[HV]` each; with decays for each key `dt_bias[HV * K]`."""

    spec: Recurrence
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor | None = None  # `D v` is added to what is read


class RecurrenceInputs(NamedTuple):
    """Of `T` tokens of a recurrence: `mixed[T, mixed_dim]` after the convolution, raw `a[T, num_decays]` and, with the
    delta rule alone, raw `b[T, HV]`."""

    mixed: Tensor
    a: Tensor
    b: Tensor | None


class ConvTaps(NamedTuple):
    """Of a layer's convolution: `weight[D, W]`, `bias[D]`, and whether SiLU is last. Fastest on a GPU where each tap's
    weights lie side by side."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


class ScanInputs(NamedTuple):
    """Of `T` tokens of a selective scan: `x`, the raw step `dt` and the gate `z` `[T, D]`, `b` and `c` `[T, N]`."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    z: Tensor


@dataclass(frozen=True, slots=True)
class ScanParams:
    """Per-layer constants, fp32: rates `A[D, N]` (negative), `dt_bias[D]`, and `skip[D]`, x's way past the state."""

    A: Tensor
    dt_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm over each head of queries and keys, fp32 weights `[D]`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KVScales:
    """The factors of keys and values that are kept in 8 bits (float8_e4m3fn): a value is what is kept times its token's
    and head's factor, fp32 `[P, Hkv, 64, 1]`, strided views of the same arena."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, cache: Mapping[str, Tensor]) -> KVScales | None:
        """A layer's, if its keys and values are in 8 bits."""
        return cls(cache["k_scale"], cache["v_scale"]) if "k_scale" in cache else None

    def fit(self, cache: Tensor) -> bool:
        """Whether they are dense in the blocks of `cache[P, Hkv, 64, D]` and both lie the same way."""
        shape, stride = cache.shape[:3], (cache.shape[2], 1)
        return all(s.shape[:3] == shape and s.stride()[1:3] == stride for s in (self.k, self.v)) and (
            self.k.stride(0) == self.v.stride(0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How the experts of a token are chosen and weighed.

    A share is the softmax over all scores, or each score's sigmoid. The `top_k` experts of the largest shares, a
    correction bias added, are chosen; with groups, among the `top_groups` groups of neighbours whose two best add up
    to most. They weigh their shares without the bias, divided by `eps` and their sum if `normalise`, times `scale`.
    The `num_shared` experts behind the routed ones weigh the sigmoid of their gate, or 1 if they are plain.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    eps: float = 0.0
    scale: float = 1.0
    num_shared: int = 0
    shared: Literal["gated", "plain"] = "plain"

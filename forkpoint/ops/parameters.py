"""Operator arguments that are not plain tensors: the form of a recurrence, a scan or a router, norms and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Out: TypeAlias = Tensor | None  # the output tensor; with None the operator allocates one
Records: TypeAlias = Sequence[Tensor]  # the records that a layer's tokens leave, in the order its operator documents


def into(out: Out, found: Tensor) -> Tensor:
    """Return the result of an operator that has allocated it: copied to `out` if that is given, otherwise as it is."""
    if out is None:
        return found
    return out.copy_(found)


class GateLimits(NamedTuple):
    """Limits of a gated activation: gate(x) is at most `gate`, and up(x) lies within `up` of 0."""

    gate: float
    up: float

    @classmethod
    def of_silu(cls, limit: float) -> GateLimits:
        """Return the limits with which silu(gate(x)) is at most `limit`, as is the size of up(x)."""
        low, high = limit, limit + 1.0  # silu(low) <= limit <= silu(high), and silu rises between them
        for _ in range(64):
            middle = (low + high) / 2
            if middle / (1.0 + math.exp(-middle)) < limit:
                low = middle
            else:
                high = middle
        return cls(high, limit)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The form of a layer's recurrence. `mixed` is laid out `[q (H*K) | k (H*K) | v (HV*V)]`.

    For each token and head: `S <- e^g S`, with `g = -exp(A_log) * step` and `step = softplus(a + dt_bias)` clamped to
    `step_limit`; then `S <- S + beta v k^T`; the output is `S q`. With the delta rule, `S k` is subtracted from v
    first, q and k are l2-normalised (eps 1e-6 under the root), q is scaled by K**-0.5, and `beta = sigmoid(b)`. Without
    it (Mamba-2, where q is C, k is B and v is x) q and k are used as they are, and `beta = step`.
    """

    num_k_heads: int  # H
    num_v_heads: int  # HV, a multiple of H; value head hv uses q/k head hv // (HV // H)
    key_dim: int  # K
    value_dim: int  # V
    double_beta: bool = False  # beta is 2 sigmoid(b) (OLMo-Hybrid)
    delta: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    per_key: bool = False  # each key dim has its own decay (KDA); requires the delta rule and H = HV
    bound: float | None = None  # for `per_key`: g = bound * sigmoid(exp(A_log) (a + dt_bias)) instead

    @property
    def num_decays(self) -> int:
        """Number of decays of one token, the width of `a`."""
        return self.num_v_heads * (self.key_dim if self.per_key else 1)

    @property
    def mixed_dim(self) -> int:
        return 2 * self.num_k_heads * self.key_dim + self.num_v_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class RecurrenceParams:
    """A layer's recurrence and its constants, fp32 `[HV]` each. With a decay per key, `dt_bias` is `[HV * K]`."""

    spec: Recurrence
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor | None = None  # `D v` is added to the output


class RecurrenceInputs(NamedTuple):
    """The inputs of `T` tokens: `mixed[T, mixed_dim]` after the convolution, raw `a[T, num_decays]`, and raw `b[T,
    HV]`, which is None without the delta rule."""

    mixed: Tensor
    a: Tensor
    b: Tensor | None


class ConvTaps(NamedTuple):
    """A layer's convolution: `weight[D, W]`, `bias[D]`, and whether SiLU follows. GPUs are fastest if the weights of
    one tap are contiguous."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


class ScanInputs(NamedTuple):
    """The inputs of `T` tokens of a selective scan: `x`, raw step `dt` and gate `z` `[T, D]`, `b` and `c` `[T, N]`."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    z: Tensor


@dataclass(frozen=True, slots=True)
class ScanParams:
    """A scan layer's fp32 constants: rates `A[D, N]` (negative), `dt_bias[D]`, and the skip connection `skip[D]`."""

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
    """The scales of keys and values in 8 bits (float8_e4m3fn), one per token and head.

    The value is the stored number times its scale. Scales are fp32 `[P, Hkv, 64, 1]`, strided views of the arena."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, cache: Mapping[str, Tensor]) -> KVScales | None:
        """Return a layer's scales, or None if its keys and values are not in 8 bits."""
        return cls(cache["k_scale"], cache["v_scale"]) if "k_scale" in cache else None

    def fit(self, cache: Tensor) -> bool:
        """Return whether both are dense within the blocks of `cache[P, Hkv, 64, D]` and have equal strides."""
        shape, stride = cache.shape[:3], (cache.shape[2], 1)
        return all(s.shape[:3] == shape and s.stride()[1:3] == stride for s in (self.k, self.v)) and (
            self.k.stride(0) == self.v.stride(0)
        )


@dataclass(frozen=True, slots=True)
class PoolRule:
    """A query attends to at most `most` complete pools of `size` tokens each, and to the tokens after them.

    Pools are counted from a sequence's first token. `size` divides the tokens of a block."""

    size: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How the router chooses and weighs a token's experts.

    An expert's share is the softmax over all scores, or the sigmoid of its own score. The `top_k` experts with the
    largest share plus correction bias are chosen. With groups, only the `top_groups` groups of adjacent experts compete
    whose two best experts have the largest sum. A chosen expert's weight is its share without the bias, divided by the
    sum of the chosen shares plus `eps` if `normalise`, times `scale`. The `num_shared` experts after the routed ones
    weigh the sigmoid of their gate, or 1 if they are plain.
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

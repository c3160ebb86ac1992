"""The whole recurrent step as three operators, for backends that have no kernel for it."""

from __future__ import annotations

from torch import Tensor

from forkpoint.ops.metadata import DecodeIndex
from forkpoint.ops.table import ConvUpdate, GatedRMSNorm, GDNDecode, GDNLayer


class ComposedStep:
    """`GDNStep` by the operators given."""

    def __init__(self, conv_update: ConvUpdate, gdn_decode: GDNDecode, gated_rmsnorm: GatedRMSNorm) -> None:
        self._conv_update, self._decode, self._norm = conv_update, gdn_decode, gated_rmsnorm

    def __call__(
        self,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        gate: Tensor,
        layer: GDNLayer,
        conv_pool: Tensor,
        pool: Tensor,
        conv_index: DecodeIndex,
        index: DecodeIndex,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `GDNStep`."""
        mixed = self._conv_update(mixed, layer.conv_weight, None, conv_pool, conv_index, True)
        answer = self._decode(mixed, a, b, layer.gates, pool, index)
        return self._norm(answer, gate, layer.norm_weight, layer.norm_eps, out)

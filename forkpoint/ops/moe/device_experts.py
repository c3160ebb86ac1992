"""Routed experts on a GPU: the choice of kernels and tiles by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.linear.device_linear import within
from forkpoint.ops.linear.fragments import FragmentExperts, fits_fragments, in_fragments
from forkpoint.ops.linear.packed import FourBitExperts, PackedMatrix
from forkpoint.ops.linear.packed_kernel import widen_packed
from forkpoint.ops.linear.scaled import Matrix, ScaledExperts, ScaledMatrix, dense
from forkpoint.ops.linear.tiles import Tile
from forkpoint.ops.linear.unpack_kernel import widen_fragments
from forkpoint.ops.moe.four_bit_experts import four_bit_experts
from forkpoint.ops.moe.fragment_experts import fits_prompts, fragment_experts, prompt_experts
from forkpoint.ops.moe.kernel import UNORDERED_TOKENS, grouped_experts, paired_experts, takes_warps, warps_experts
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import GateLimits
from forkpoint.platforms.table import traits_of

WIDENED_ROWS = 192  # pairs of an expert from which it pays to widen all experts in 4 bits, if bits need not agree
PROMPT_ROWS = 32  # pairs of an expert from which whole warp groups widen fragments
MAX_PAIRED = 36  # (token, expert) pairs; up to here most experts are read by one pair only
FEW_WARPS_ROWS = 12  # mean number of pairs of an FP8 expert up to which groups of warps are slower
FEW_ROWS, FEW_SCALED_ROWS = 2, 6  # mean number of pairs of a bfloat16 and an FP8 expert up to which tiles have 8 rows

AnyExperts: TypeAlias = PackedExperts | ScaledExperts | FourBitExperts | FragmentExperts


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """The `experts` operator of a GPU. With `deterministic`, a token's bits do not depend on the batch."""

    deterministic: bool

    def prepare(self, gate_up: Matrix, down: Matrix) -> AnyExperts:
        """Keep the weights as loaded, or put those in 4 bits into fragments, as `prepare_linear` does. If only one of
        them is quantised, widen it."""
        if isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix):
            masks = traits_of(down.words.device).masks_gathers
            if masks and not self.deterministic and fits_fragments(gate_up) and fits_fragments(down):
                return FragmentExperts(in_fragments(gate_up), in_fragments(down))
            return FourBitExperts(gate_up, down) if masks else PackedExperts(gate_up.dense(), down.dense())
        if isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix):
            packed, masks = ScaledExperts(gate_up, down), traits_of(down.codes.device).masks_gathers
            if not masks and not packed.by_pairs:
                packed = packed._replace(gate_up=gate_up.by_row())
            return packed
        return PackedExperts(dense(gate_up), dense(down))

    def __call__(
        self,
        x: Tensor,
        packed: AnyExperts,
        weights: Tensor,
        ids: Tensor,
        parts: bool = False,
        limits: GateLimits | None = None,
    ) -> Tensor:
        """Return each token's weighted sum of its experts' outputs (`OpTable.experts`).

        With `parts`, the result may be `Parts`.
        """
        x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.int().contiguous()
        if isinstance(packed, FragmentExperts):
            if ids.numel() < PROMPT_ROWS * packed.down.shape[0]:
                return fragment_experts(x, packed, weights, ids, parts, limits)
            if fits_prompts(packed):
                return prompt_experts(x, packed, weights, ids, parts, limits)
            packed = PackedExperts(widen_fragments(packed.gate_up), widen_fragments(packed.down))
        if isinstance(packed, FourBitExperts):
            if self.deterministic or ids.numel() < WIDENED_ROWS * packed.down.shape[0]:
                return four_bit_experts(x, packed, weights, ids, parts, limits)
            packed = PackedExperts(widen_packed(packed.gate_up), widen_packed(packed.down))
        mean_rows = min(ids.numel() / packed.down.shape[0], launch_table(x.device).most_expert_rows)
        if isinstance(packed, ScaledExperts):
            apart = packed.by_pairs and traits_of(x.device).masks_gathers
            narrows = apart and not self.deterministic and traits_of(x.device).multiplies_fp8
            if narrows and mean_rows > FEW_WARPS_ROWS and x.dtype == torch.bfloat16 and takes_warps(packed):
                return warps_experts(x, packed, weights, ids, parts, limits)
            into, out_of = _scaled_tiles(x.dtype, len(x), mean_rows, narrows)
            into = within(into, x.device, gated_fp8=True)
        else:
            apart = traits_of(x.device).masks_gathers
            few_rows = 8 if apart and not self.deterministic else 16
            into, out_of = _tiles(x.dtype, mean_rows, packed.gated, few_rows)
        if not self.deterministic and ids.numel() <= MAX_PAIRED and apart:
            return paired_experts(x, packed, weights, ids, limits)
        return grouped_experts(x, packed, weights, ids, into, out_of, parts, limits)


def _tiles(dtype: torch.dtype, mean_rows: float, gated: bool = True, few_rows: int = 16) -> tuple[Tile, Tile]:
    """Return the tiles for the products into and out of experts with `mean_rows` pairs each.

    `few_rows` is the number of rows of the smallest tile. All tiles of 16 rows and more give equal bits."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2)
    if mean_rows <= 12:
        tile = Tile(few_rows if mean_rows <= FEW_ROWS else 16, 64, 128, 4, 3, turned=True)
        return tile, tile
    if mean_rows <= 96:
        return Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)
    if gated:
        return Tile(128, 64, 64, 4, 3, turned=True), Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)


def _scaled_tiles(dtype: torch.dtype, num_tokens: int, mean_rows: float, narrows: bool) -> tuple[Tile, Tile]:
    """Return the tiles for FP8 experts. If `narrows`, activations are rounded to FP8 too.

    Otherwise the weights are the left operand, which can be widened in registers."""
    if dtype == torch.float32:
        return _tiles(dtype, mean_rows)
    if narrows:
        if mean_rows <= 40:
            is_few, fits_once = mean_rows <= FEW_SCALED_ROWS, 8 < num_tokens <= UNORDERED_TOKENS
            rows = 32 if mean_rows > 16 else 8 if is_few and not fits_once else 16
            out_of = Tile(rows, 128, 128, 4, 2, turned=True, narrows=True)
            return replace(out_of, num_stages=3 if is_few or rows > 16 else 2), out_of
        if mean_rows <= 96:
            return Tile(64, 64, 128, 4, 3, narrows=True), Tile(64, 64, 128, 4, 3, narrows=True)
        return Tile(128, 128, 128, 16, 3, narrows=True), Tile(128, 64, 128, 8, 3, narrows=True)
    if mean_rows > 96:
        return Tile(128, 64, 128, 8, 3, turned=True), Tile(128, 128, 128, 8, 3, turned=True)
    tile = Tile(16 if mean_rows <= 12 else 64, 64, 128, 4, 3, turned=True)
    return tile, tile

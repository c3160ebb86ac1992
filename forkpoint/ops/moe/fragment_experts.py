"""Routed experts with weights in 4 bits in fragments."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.ops.linear.fragments import FragmentExperts
from forkpoint.ops.linear.fragments_kernel import FragmentTile, launch_fragments
from forkpoint.ops.linear.parts_kernel import make
from forkpoint.ops.moe.fragment_prompt_kernel import columns_across, launch_prompt
from forkpoint.ops.moe.order_kernel import order_by_expert
from forkpoint.ops.parameters import GateLimits
from forkpoint.ops.unmade import Parts

MAX_PAIRED: Final = 45  # (token, expert) pairs; up to here each pair has tiles of its own
FEW_ROWS: Final = 8  # mean number of pairs of an expert up to which tiles have as many rows
# Tiles of the products into and out of experts. `outputs` of PROMPT divide the rows of both matrices, or of each half.
PAIRED: Final = (FragmentTile(8, 16, 2, 3, deep=True), FragmentTile(8, 32, 2, 6))
SORTED_FLOATS: Final = (FragmentTile(8, 128, 4, 3), FragmentTile(8, 128, 4, 3))
SORTED_INTEGERS: Final = (FragmentTile(8, 32, 2, 3, deep=True), FragmentTile(8, 64, 4, 4))
MORE: Final = FragmentTile(32, 64, 2, 3)
PROMPT: Final = FragmentTile(64, 128, 4, 3)


def fragment_tiles(num_pairs: int, packed: FragmentExperts) -> tuple[FragmentTile, FragmentTile]:
    """Return the tiles of the products into and out of experts."""
    if num_pairs <= MAX_PAIRED:
        return PAIRED
    if num_pairs > FEW_ROWS * packed.down.shape[0]:
        return MORE, MORE
    return SORTED_FLOATS if packed.gate_up.floats else SORTED_INTEGERS


def fragment_experts(
    x: Tensor,
    packed: FragmentExperts,
    weights: Tensor,
    ids: Tensor,
    parts: bool = False,
    limits: GateLimits | None = None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs.

    With `parts`, the outputs of a token's experts are returned as `Parts`. `limits`: see `silu_mul`. Few pairs are
    computed one by one; more are sorted by expert."""
    num_tokens, top_k = ids.shape
    num_experts, size, inner = packed.down.shape
    num_pairs = count = ids.numel()
    into, out_of = fragment_tiles(num_pairs, packed)
    given: dict[str, Any] = {"ids": ids, "choices": top_k}
    if num_pairs > MAX_PAIRED:
        order = order_by_expert(ids, num_experts, into.rows)
        given["order"], count = order, order.tiles.shape[1]
    hidden, answers = x.new_empty(num_pairs, inner), x.new_empty(num_pairs, size)
    cut = (count, count, 1, 0)
    gates: dict[str, Any] = {"gated": packed.gated, "squared": not packed.gated, "limits": limits}
    launch_fragments(x, packed.gate_up, hidden, into, cut, into=True, **gates, **given)
    launch_fragments(hidden, packed.down, answers, out_of, cut, **given)
    left = Parts.of(answers.view(num_tokens, top_k, size), weights)
    return left if parts else make(left, None, torch.empty(num_tokens, size, dtype=x.dtype, device=x.device))


def fits_prompts(packed: FragmentExperts) -> bool:
    """Return whether `prompt_experts` supports these weights."""
    _, size, inner = packed.down.shape
    return inner % (PROMPT.outputs // (1 + packed.gated)) == 0 and size % PROMPT.outputs == 0


def prompt_experts(
    x: Tensor,
    packed: FragmentExperts,
    weights: Tensor,
    ids: Tensor,
    parts: bool = False,
    limits: GateLimits | None = None,
) -> Tensor:
    """Return `fragment_experts` of many tokens."""
    num_tokens, top_k = ids.shape
    num_experts, size, inner = packed.down.shape
    order = order_by_expert(ids, num_experts, PROMPT.rows)
    hidden, answers = x.new_empty(ids.numel(), inner), x.new_empty(ids.numel(), size)
    gates: dict[str, Any] = {"gated": packed.gated, "squared": not packed.gated, "limits": limits}
    launch_prompt(columns_across(x), packed.gate_up, hidden, PROMPT, order, top_k, into=True, **gates)
    launch_prompt(hidden, packed.down, answers, PROMPT, order, top_k, into=False)
    left = Parts.of(answers.view(num_tokens, top_k, size), weights)
    return left if parts else make(left, None, torch.empty(num_tokens, size, dtype=x.dtype, device=x.device))

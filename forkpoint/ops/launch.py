"""Launch options of some devices only: a start that overlaps the end of the launch before, a cap on registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forkpoint.platforms.table import traits_of

MOST_ROWS = 512  # of launches that overlap
AT_ONCE = tl.constexpr(2)  # an OVERLAP: `await_before` lets the next launch start too


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Return when everything that earlier launches wrote can be read, and let the next launch start.

    A kernel calls this first: the launch before it may still be at work. What older launches wrote can be read even
    before the call, because the launch before this one let it start only after it had waited for them itself.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_before(OVERLAP: tl.constexpr):
    """The first half of `await_inputs`, for kernels of many programs that call `start_next` when their loads are done:
    programs of the next launch that come earlier would crowd some processors. With AT_ONCE it is the whole."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if OVERLAP == AT_ONCE:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next launch start, if it may not yet."""
    if OVERLAP and OVERLAP != AT_ONCE:
        tl.extra.cuda.gdc_launch_dependents()


def overlap(device: torch.device, num_rows: int, at_once: bool = False) -> dict[str, Any]:
    """Launch options for a kernel over `num_rows` tokens that calls these: overlap where the device can.

    Only where launches are short: programs that wait hold room that a long launch before them would use. `at_once`:
    a kernel with `await_before` lets the next launch start before its loads; products of FP8 are slower with it.
    """
    if num_rows > MOST_ROWS or not traits_of(device).overlaps_launches:
        return {"OVERLAP": False}
    return {"OVERLAP": AT_ONCE.value if at_once else True, "launch_pdl": True}


def straight(device: torch.device) -> dict[str, Any]:
    """For a kernel with a second form, in which the rows of each masked load are a straight line."""
    return {"STRAIGHT": not traits_of(device).masks_gathers}


def capped_registers(device: torch.device, per_thread: int) -> dict[str, Any]:
    """Launch options for a kernel whose programs should leave room for more of them on a processor."""
    return {"maxnreg": per_thread} if traits_of(device).caps_registers else {}

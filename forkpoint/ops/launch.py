"""Launch options that only some devices have: overlap with the previous launch, and a limit on registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forkpoint.platforms.table import traits_of

AT_ONCE = tl.constexpr(2)  # a value of OVERLAP: `await_before` also lets the next launch start


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Wait until everything that earlier launches wrote can be read, and let the next launch start.

    A kernel calls this before it reads the output of the previous launch, which may still be running. Output of older
    launches can be read before the call, because the previous launch waited for them before it let this one start.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_before(OVERLAP: tl.constexpr):
    """Wait as `await_inputs` does, without letting the next launch start (unless OVERLAP is AT_ONCE).

    Kernels with many programs call `start_next` when their loads are done. Programs of the next launch that start
    earlier would crowd some processors."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if OVERLAP == AT_ONCE:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next launch start, unless `await_before` has done so."""
    if OVERLAP and OVERLAP != AT_ONCE:
        tl.extra.cuda.gdc_launch_dependents()


def overlap(device: torch.device, num_rows: int, at_once: bool = False) -> dict[str, Any]:
    """Return the launch options of a kernel over `num_rows` tokens that calls these functions.

    Short launches overlap on devices that support it. In long launches, waiting programs would hold resources that the
    previous launch needs. `at_once`: a kernel with `await_before` lets the next launch start before its own loads.
    Large FP8 products are slower with it.
    """
    most = traits_of(device).most_overlapped_rows
    if not most or num_rows > most:
        return {"OVERLAP": False}
    return {"OVERLAP": AT_ONCE.value if at_once else True, "launch_pdl": True}


def straight(device: torch.device) -> dict[str, Any]:
    """Return the option of kernels with a second form for devices that drop the masks of gathered loads."""
    return {"STRAIGHT": not traits_of(device).masks_gathers}


def capped_registers(device: torch.device, per_thread: int) -> dict[str, Any]:
    """Return launch options that limit registers, so that more programs fit on a processor."""
    return {"maxnreg": per_thread} if traits_of(device).caps_registers else {}

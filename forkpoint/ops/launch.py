"""Launch options of some devices only: a start that overlaps the end of the launch before, a cap on registers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Return when everything that earlier launches wrote can be read, and let the next launch start.

    A kernel calls this first: the launch before it may still be at work.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_before(OVERLAP: tl.constexpr):
    """The first half of `await_inputs`, for kernels of many programs that call `start_next` when their loads are done:
    programs of the next launch that come earlier would crowd some processors."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next launch start."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options for a kernel that calls these: overlap on CUDA capability 9 and later."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


def capped_registers(device: torch.device, per_thread: int) -> dict[str, Any]:
    """Launch options for a kernel whose programs should leave room for more of them on a processor."""
    return {"maxnreg": per_thread} if device.type == "cuda" and torch.version.cuda is not None else {}

"""A plugin for pytest (`-p tests.ops.on_ptx`): Triton's kernels are compiled for a Hopper GPU, which need not be here,
and run on the host by their PTX. Without it they run under Triton's interpreter."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from forkpoint.platforms.cpu import CpuPlatform
from tests.ascend.sm90 import HOPPER, Absent  # which turns the interpreter off
from tests.ops import ptx

compile_only = JITFunction.run


def flat(value: Any, kind: Any) -> Iterator[int]:
    """The bits of what is no constant."""
    if isinstance(kind, tuple):
        for one, each in zip(value, kind, strict=True):
            yield from flat(one, each)
    elif kind == "fp32":
        yield int.from_bytes(struct.pack("<f", value), "little")
    elif kind != "constexpr":
        yield value.data_ptr() if kind.startswith("*") else int(value)


def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    made = compile_only(self, *args, grid=grid, warmup=True, **options)
    given = dict(zip(self.arg_names, args, strict=False)) | options
    bits = [each for name, kind in made.src.signature.items() for each in flat(given[name], kind)]
    ptx.run(made.asm["ptx"], [*bits, 0, 0], grid[0])


CpuPlatform.traits = classmethod(lambda cls, device: HOPPER)  # type: ignore[assignment, method-assign]
JITFunction.run = run
driver.set_active(Absent())

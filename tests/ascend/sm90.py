"""Compile every launch of the operators, at the shapes of models, for a Hopper GPU. No GPU is needed.

    python -m tests.ascend.sm90 before.json        # in one checkout
    python -m tests.ascend.sm90 after.json before.json

The second call prints the launches whose PTX differs, apart from source lines, and fails if there are any.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.platform import DeviceTraits
from tests.ascend.shapes import DENSE, MIXTURE, ODD, calls

HOPPER = DeviceTraits(
    num_processors=132, most_overlapped_rows=512, has_fp8=True, multiplies_fp8=True, caps_registers=True
)


class Absent:
    """Stands in for a driver: answers what Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def instructions() -> dict[str, str]:
    """Return a hash of the PTX of each launch."""
    found: dict[str, str] = {}
    label, compile_only = "", JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = compile_only(self, *args, grid=grid, warmup=True, **options)
        text = re.sub(r"//.*|\s*\.loc.*", "", made.asm["ptx"])
        found[f"{label}: {self.fn.__name__} {len(found)}"] = hashlib.sha256(text.encode()).hexdigest()

    CpuPlatform.traits = classmethod(lambda cls, device: HOPPER)  # type: ignore[assignment, method-assign]
    JITFunction.run = run
    driver.set_active(Absent())
    for shape in (DENSE, MIXTURE, ODD):
        for what, call in calls(shape):
            label = f"{shape.name} {what}"
            call()
    return found


def main() -> None:
    own, *others = map(Path, sys.argv[1:])
    found = instructions()
    own.write_text(json.dumps(found, indent=0))
    print(f"{len(found)} launches compiled for sm_90")
    for other in others:
        before = json.loads(other.read_text())
        changed = sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))
        print(f"{len(changed)} are not those of {other}", *changed, sep="\n  ")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()

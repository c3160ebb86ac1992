"""Launches of Triton kernels lowered for an Ascend 910B by triton-ascend, up to the IR that Huawei's compiler gets.

Importing this replaces what a launch does in the Triton that is here, which must be triton-ascend 3.2.0.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.backends.ascend.compiler as ascend
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.npu import COMPILER_ENVIRONMENT, npu_traits
from forkpoint.platforms.platform import DeviceTraits

TARGET = GPUTarget("npu", "Ascend910B2", 0)
BACKEND = make_backend(TARGET)
SIGNALS = (-6, -11, 134, 139)  # the adapter crashes at random; the same text is lowered the next time
TRIES = 6
os.environ.setdefault(*COMPILER_ENVIRONMENT)
KEEP_MASKS = "--discrete-mask-access-conversion=compile-on-910-95=False force-simt-template=False"


class NotLowered(Exception):
    """triton-ascend refuses a kernel, with these diagnostics."""


@dataclass
class Lowered:
    """One specialisation of a kernel. `calls` are those of the tests that met it, by grid."""

    name: str
    ttir: str
    linalg: str
    mode: str  # aiv: vector cores alone; mix: matrix units too
    calls: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    @property
    def row_loops(self) -> list[int]:
        """Return the turns of each loop over rows into which a load or store with a non-affine index was lowered."""
        constants = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : index", self.linalg))
        ends, found = list[str](), list[int]()
        for line in self.linalg.splitlines():
            if line.strip().startswith("}"):
                end = ends.pop()
                found += [int(constants[end])] if "ExtractedLoadOrStore" in line else []
            if line.endswith("{"):
                bound = re.search(r"scf\.for .* to (%\w+) step", line)
                ends.append(bound[1] if bound else "")
        return found

    @property
    def lost_masks(self) -> int:
        """Return the number of loads and stores whose mask the adapter drops."""
        with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
            file.write(self.ttir)
            file.flush()
            command = [ascend._get_triton_adapter_opt_path(), file.name, KEEP_MASKS]
            for _ in range(TRIES):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode not in SIGNALS:
                    break
        assert done.returncode == 0, done.stderr
        return _num_masked(self.ttir) - _num_masked(done.stdout)


def _num_masked(ttir: str) -> int:
    """Return the number of loads and stores with a mask."""
    found = re.findall(r"tt\.(load|store) ([^:{]*)", ttir)
    return sum(operands.count("%") >= (2 if kind == "load" else 3) for kind, operands in found)


@dataclass
class Launches:
    """The lowered kernels. `run` gets each launch: (specialisation, (name, value) of its arguments, grid)."""

    seen: dict[str, Lowered] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    crashes: int = 0
    run: Callable[[Lowered, list[tuple[str, Any]], tuple[int, int, int]], None] | None = None
    keep_going: bool = False  # with a kernel that is refused


LAUNCHES = Launches()


def lower(fn: JITFunction, signature: dict[str, str], constants: dict[str, Any], attrs: Any, opts: Any) -> Lowered:
    """Lower one specialisation of a kernel. Raises NotLowered."""
    known = {name: value for name, value in opts.items() if name in ascend.NPUOptions.__dataclass_fields__}
    options = BACKEND.parse_options(known)
    metadata = {"target": TARGET, **options.__dict__}
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    try:
        source = ASTSource(fn, signature, constants, attrs)
        module = source.make_ir(options, BACKEND.get_codegen_implementation(), BACKEND.get_module_map(), context)
        module = ascend.make_ttir(module, metadata, options)
    except Exception as error:
        raise NotLowered(f"{type(error).__name__}: {error}") from error
    ttir = str(module)
    for turn in range(TRIES):
        try:
            text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
            break
        except subprocess.CalledProcessError as error:
            if error.returncode not in SIGNALS or turn == TRIES - 1:
                raise NotLowered(f"rc {error.returncode}: {error.stderr.decode(errors='replace')}") from error
            LAUNCHES.crashes += 1
    linalg, metadata = ascend._parse_linalg_metadata(text, metadata)
    return Lowered(fn.__name__, ttir, linalg, metadata["mix_mode"])


def _launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if self.binder is None:
        self.create_binder(BACKEND)
    bound, specialised, constexprs, _, excess = self.binder(*args, **kwargs)
    names = [self.params[i].name for i in self.non_constexpr_indices]  # their kinds, then what is known of values
    signature = {name: "*i8" if kind == "none" else kind for name, kind in zip(names, specialised, strict=False)}
    grid = tuple(grid(bound) if callable(grid) else grid)
    grid += (1,) * (3 - len(grid))
    key = repr((self.fn.__module__, self.fn.__name__, specialised, constexprs))
    values = tuple(bound.values())
    attrs = BACKEND.get_attrs_descriptor(self.params, values)
    folded = attrs.get_constants()
    constants = {
        parameter.name: value
        for value, parameter in zip(values, self.params, strict=True)
        if parameter.is_constexpr or parameter.num in folded or value is None
    }
    if key in LAUNCHES.refused:
        return
    if key not in LAUNCHES.seen:
        try:
            LAUNCHES.seen[key] = lower(self, signature, constants, attrs, excess)
        except NotLowered as error:
            if not LAUNCHES.keep_going:
                raise NotLowered(f"{self.fn.__name__}: {error}") from error
            LAUNCHES.refused[key] = f"{self.fn.__name__}: {error}"
            return
    lowered = LAUNCHES.seen[key]
    lowered.calls[grid] += 1
    if LAUNCHES.run is not None:
        given = [(p.name, v) for p, v in zip(self.params, values, strict=True) if p.name not in constants]
        LAUNCHES.run(lowered, given, grid)


@classmethod  # type: ignore[misc]
def _traits(cls: type[CpuPlatform], device: torch.device) -> DeviceTraits:
    """The kernels' forms for an NPU, of tensors on the host."""
    return NPU


assert triton.__version__ == "3.2.0", "the Triton here is not triton-ascend's"
NPU = npu_traits(24)
CpuPlatform.traits = _traits
JITFunction.run = _launch

"""An Ascend NPU, which torch supports after `torch_npu` is imported. No card has run this; see docs/ascend.md."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Final

import torch

from forkpoint.errors import ConfigError
from forkpoint.platforms.accelerator import AcceleratorPlatform
from forkpoint.platforms.platform import DeviceTraits

# Tokens per kernel block. Prefill with 32 query rows of 256 dims in bf16 needs an estimated 157 of the 192 KiB on the
# chip with 32 tokens, 176 with 64, and 240 with 128 (the pages of CANN's own attention).
KERNEL_BLOCK_SIZES: Final = (32,)
MOST_PROGRAMS, MOST_ROWS = 65_535, 256
# triton-ascend 3.2.0 reads memory that it has freed. On some kernels it always crashes unless the allocator leaves that
# memory alone.
COMPILER_ENVIRONMENT: Final = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0")


def _missing() -> str:
    """Return why torch has no module for NPUs; "" if it has one. Imports `torch_npu`."""
    if hasattr(torch, "npu"):
        return ""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install torch-npu of torch's own version, beside CANN"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error}): source CANN's set_env.sh first"
    return ""


def _has_triton() -> bool:
    """Return whether the installed Triton compiles for NPUs; `triton-ascend` installs under the same name."""
    here = importlib.util.find_spec("triton") is not None
    return here and importlib.util.find_spec("triton.backends.ascend") is not None


def npu_traits(num_processors: int) -> DeviceTraits:
    """Return the traits of a card with `num_processors` matrix units."""
    return DeviceTraits(
        num_processors=num_processors,
        has_fp8=False,
        kernel_block_sizes=KERNEL_BLOCK_SIZES,
        state_write_interval=8,
        small_tiles=True,
        most_programs=MOST_PROGRAMS,
        most_rows=MOST_ROWS,
        masks_gathers=False,
    )


class NpuPlatform(AcceleratorPlatform):
    kind, graph_class, allocator_variable = "npu", "NPUGraph", "PYTORCH_NPU_ALLOC_CONF"

    @classmethod
    def num_devices(cls) -> int:
        return 0 if _missing() else int(torch.get_device_module("npu").device_count())

    @classmethod
    def absence(cls) -> str:
        return _missing() or "torch_npu sees no card: npu-smi info should list it"

    @classmethod
    def traits(cls, device: torch.device) -> DeviceTraits:
        properties = torch.get_device_module("npu").get_device_properties(device)
        return npu_traits(properties.cube_core_num)

    def operators(self, cpu_ops: str) -> str:
        if cpu_ops == "cpp":
            raise ConfigError("cpu_ops='cpp' is for CPUs; on an NPU give auto, triton or torch")
        if cpu_ops == "triton" and not _has_triton():
            raise ConfigError("cpu_ops='triton' needs triton-ascend on an NPU; install it, or give torch")
        if cpu_ops == "triton" or (cpu_ops == "auto" and _has_triton()):
            os.environ.setdefault(*COMPILER_ENVIRONMENT)
            return "triton-in-turns"
        if cpu_ops in ("auto", "torch"):
            self.has_graphs = False  # torch operators read lengths, so they wait for the device
            return "torch"
        return cpu_ops

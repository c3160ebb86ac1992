"""An Ascend NPU, which torch knows once `torch_npu` is imported. No card has run this: docs/ascend.md says what did."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Final

import torch

from forkpoint.errors import ConfigError
from forkpoint.platforms.accelerator import AcceleratorPlatform
from forkpoint.platforms.platform import DeviceTraits

# A key head's share of 32 tokens, and what prefill makes of it beside 32 query rows of 256 dims in bf16, live on 157
# KiB of the 192 on the chip; of 64 tokens on 176, of 128 (the pages of CANN's own attention) on 240: estimates.
KERNEL_BLOCK_SIZES: Final = (32,)
MOST_PROGRAMS, MOST_ROWS = 65_535, 256
# For triton-ascend 3.2.0, whose processes read memory that they have freed: on some kernels each crashes, unless that
# memory is left alone.
COMPILER_ENVIRONMENT: Final = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0")


def _missing() -> str:
    """Why torch has no module for NPUs; "" if it has one."""
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
    """Whether the Triton that is here compiles for NPUs: `triton-ascend` installs one under the same name."""
    here = importlib.util.find_spec("triton") is not None
    return here and importlib.util.find_spec("triton.backends.ascend") is not None


def npu_traits(num_processors: int) -> DeviceTraits:
    """Of a card of so many matrix units."""
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
    """One NPU."""

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
        name = cpu_ops
        if name == "auto":
            name = "triton" if _has_triton() else "torch"
        self.has_graphs = name != "torch"  # those wait for the device: they look at lengths
        if name == "triton":
            os.environ.setdefault(*COMPILER_ENVIRONMENT)
        return "triton-in-turns" if name == "triton" else name

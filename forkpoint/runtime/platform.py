"""The only place that names a kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.errors import ConfigError


class Platform(Protocol):
    """What the runtime asks of a device."""

    @property
    def device(self) -> torch.device: ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory from which copies to the device are fastest."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device. On a CPU the tensor shares the array's memory."""

    def free_bytes(self) -> int:
        """Device memory that could be allocated now."""

    def arena_bytes(self, utilization: float) -> int | None:
        """What is left for the arena of that share of the device's memory; None where memory is shared with others."""

    def synchronize(self) -> None:
        """Wait for all work issued to the device."""


class CpuPlatform:
    """The host itself. `root` is where `/proc` and `/sys` are mounted."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.device = torch.device("cpu")
        self._root = root

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def free_bytes(self) -> int:
        """What the kernel calls available, within the memory limit of the control group (v2 or v1)."""
        free = self._available_bytes()
        group = self._root / "sys/fs/cgroup"
        for limit, used in (
            (group / "memory.max", group / "memory.current"),
            (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
        ):
            if limit.exists() and used.exists():
                text = limit.read_text().strip()
                if text != "max":
                    free = min(free, int(text) - int(used.read_text()))
        return max(0, free)

    def _available_bytes(self) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
        raise ConfigError("/proc/meminfo has no MemAvailable line; give kv_cache_memory_bytes")

    def arena_bytes(self, utilization: float) -> int | None:
        """The host's memory is not ours to fill."""

    def synchronize(self) -> None:
        """Work on a CPU is done when the call returns."""


class CudaPlatform:
    """One CUDA device."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        source = torch.from_numpy(array)
        staged = self.host_buffer(tuple(source.shape), source.dtype).copy_(source)
        # The host allocator keeps the staged memory from reuse until the copy is done.
        return staged.to(self.device, non_blocking=True)

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + cached

    def arena_bytes(self, utilization: float) -> int | None:
        """What all programs hold now, loaded weights above all, counts against the share."""
        total = int(torch.cuda.mem_get_info(self.device)[1])
        return max(0, int(total * utilization) - (total - self.free_bytes()))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def resolve_platform(name: str = "cpu") -> Platform:
    """`cpu`, `cuda` with an optional `:index`, or `auto`: cuda if there is one.

    Raises ConfigError for others and for an absent device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return CpuPlatform()
    if kind == "cuda" and (not index or index.isdigit()):
        if int(index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {name!r} is not here: {torch.cuda.device_count()} CUDA devices were found")
        return CudaPlatform(int(index or 0))
    raise ConfigError(f"device {name!r} is not known; give 'auto', 'cpu', 'cuda' or 'cuda:<index>'")

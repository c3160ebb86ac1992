"""The host as a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.platforms.platform import DeviceTraits, Mark

NUM_KEPT_PRODUCTS = 64  # shapes; layers of many rows come with about 24 numbers of them (ops/cpu/tiles.py)


class _PastMark:
    """Work on a CPU is done when the call that issues it returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CpuPlatform:
    """The host itself. `root` is where `/proc` and `/sys` are mounted."""

    collectives: ClassVar = "gloo"
    serves_all_ranks: ClassVar = True
    defaults: ClassVar = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=64, async_scheduling=False)

    def __init__(self, index: int = 0, root: Path = Path("/")) -> None:
        self.device = torch.device("cpu")
        self.shares_memory, self.has_graphs = True, False
        # oneDNN, and torch beside it, keep code for every shape of a matrix product met, up to a megabyte each. Both
        # read their bound at the first product.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, str(NUM_KEPT_PRODUCTS))
        self._root = root

    @classmethod
    def num_devices(cls) -> int:
        return 1

    @classmethod
    def absence(cls) -> str:
        return ""  # a host is always here

    @classmethod
    def traits(cls, device: torch.device) -> DeviceTraits:
        return DeviceTraits()

    def operators(self, cpu_ops: str) -> str:
        if cpu_ops == "triton":
            raise ConfigError("cpu_ops='triton' needs a GPU; give auto, torch or cpp")
        return cpu_ops

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Nothing is gained by graphs on a CPU; the work itself is the graph."""
        return run

    def mark(self) -> Mark:
        return _PastMark()

    def mirror(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

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

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The host's memory is not counted."""
        run()
        return 0

    def release_unused(self) -> None:
        """The host's allocator does so by itself."""

    def synchronize(self) -> None:
        """Work on a CPU is done when the call returns."""

"""The host as a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch

from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.platforms.control_group import free_group_bytes
from forkpoint.platforms.platform import Platform

NUM_KEPT_PRODUCTS = 64  # shapes of products that libraries keep code for


class CpuPlatform(Platform):
    """The host as the only device. `root` is where `/proc` and `/sys` are mounted."""

    collectives: ClassVar = "gloo"
    serves_all_ranks: ClassVar = True
    defaults: ClassVar = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=64, async_scheduling=False)

    def __init__(self, index: int = 0, root: Path = Path("/")) -> None:
        self.device = torch.device("cpu")
        # oneDNN and torch keep code for every shape of a product, up to a megabyte each. Both read their limit at the
        # first product.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, str(NUM_KEPT_PRODUCTS))
        self._root = root

    @classmethod
    def num_devices(cls) -> int:
        return 1

    def operators(self, cpu_ops: str) -> str:
        if cpu_ops == "triton":
            raise ConfigError("cpu_ops='triton' needs a GPU; give auto, torch or cpp")
        return cpu_ops

    def free_bytes(self) -> int:
        """Return available memory, within the limits of control groups.

        Raises ConfigError if `/proc/meminfo` does not say.
        """
        free, within = self._available_bytes(), free_group_bytes(self._root)
        return free if within is None else max(0, min(free, within))

    def _available_bytes(self) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
        raise ConfigError("/proc/meminfo has no MemAvailable line; give kv_cache_memory_bytes")


def free_host_bytes() -> int:
    """Return the host's available memory, whatever device the model runs on. Raises ConfigError if unknown."""
    return CpuPlatform().free_bytes()

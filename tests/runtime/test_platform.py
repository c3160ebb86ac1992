"""What the platform says of memory, and which devices it resolves."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from forkpoint.errors import ConfigError
from forkpoint.platforms.accelerator import AcceleratorPlatform
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.cuda import CudaPlatform
from forkpoint.platforms.table import resolve_platform

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    500 kB\n"
SERVICE = "sys/fs/cgroup/system.slice/forkpoint.service"


def make_root(root: Path, files: dict[str, str]) -> CpuPlatform:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CpuPlatform(root=root)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 512000),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "7\n"}, 512000),
        ({"sys/fs/cgroup/memory.max": "300000\n", "sys/fs/cgroup/memory.current": "100000\n"}, 200000),
        ({"sys/fs/cgroup/memory.max": "300\n", "sys/fs/cgroup/memory.current": "400\n"}, 0),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            512000,
        ),
        (
            {
                "proc/self/cgroup": "0::/system.slice/forkpoint.service\n",
                f"{SERVICE}/memory.max": "300000\n",
                f"{SERVICE}/memory.current": "100000\n",
                "sys/fs/cgroup/system.slice/memory.max": "max\n",
                "sys/fs/cgroup/system.slice/memory.current": "400000\n",
            },
            200000,
        ),
        (
            {
                "proc/self/cgroup": "0::/system.slice/forkpoint.service\n",
                f"{SERVICE}/memory.max": "max\n",
                f"{SERVICE}/memory.current": "100000\n",
                "sys/fs/cgroup/system.slice/memory.max": "410000\n",
                "sys/fs/cgroup/system.slice/memory.current": "400000\n",
            },
            10000,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "250000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 5\ntotal_inactive_file 150000\n",
            },
            200000,
        ),
        (  # a container that sees the host's path and its own group at the top
            {
                "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
                "sys/fs/cgroup/memory.max": "300000\n",
                "sys/fs/cgroup/memory.current": "250000\n",
                "sys/fs/cgroup/memory.stat": "anon 100000\ninactive_file 150000\n",
            },
            200000,
        ),
    ],
)
def test_free_bytes_respect_the_control_group(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert make_root(tmp_path, files).free_bytes() == free


def test_meminfo_without_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        make_root(tmp_path, {"proc/meminfo": "MemTotal: 3 kB\n"}).free_bytes()


def test_this_machine_has_memory() -> None:
    platform = resolve_platform("cpu")
    assert platform.device == torch.device("cpu")
    assert platform.free_bytes() > 0
    array = np.arange(3, dtype=np.int32)
    shared = platform.upload(array)
    array[0] = 9
    assert shared.tolist() == [9, 1, 2]
    assert platform.host_buffer((2, 3), torch.int32).shape == (2, 3)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:1", "cuda:99"])
def test_unknown_and_absent_devices_are_refused(name: str) -> None:
    for num_ranks in (1, 2):
        with pytest.raises(ConfigError, match=name):
            resolve_platform(name, num_ranks=num_ranks)


@pytest.mark.parametrize(("version", "given", "left"), [("13.0", None, "0"), ("13.0", "64", "64"), (None, None, None)])
def test_only_nvidias_library_is_told_to_do_without_a_workspace(
    version: str | None, given: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody gives it one; builds of torch for AMD read the same variable."""
    name = "CUBLASLT_WORKSPACE_SIZE"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(AcceleratorPlatform, "__init__", lambda self, index: None)
    CudaPlatform()
    assert os.environ.get(name) == left


@pytest.mark.parametrize("feature", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_cpus_that_multiply_bf16_in_other_ways_are_other_hardware(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products have other bits, although torch's capability is AVX512 for all of them."""
    found = set[str]()
    for has_it in (False, True):
        monkeypatch.setattr(torch.cpu, feature, lambda has_it=has_it: has_it)
        found.add(CpuPlatform().hardware)
    assert len(found) == 2

"""The kinds of devices. Nothing else names one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from forkpoint.errors import ConfigError
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.cuda import CudaPlatform
from forkpoint.platforms.npu import NpuPlatform
from forkpoint.platforms.platform import DeviceTraits, Platform
from forkpoint.plugins import Registry

AUTO: Final = "auto"
OWN: Final[Mapping[str, type[Platform]]] = MappingProxyType(
    {"cuda": CudaPlatform, "npu": NpuPlatform, "cpu": CpuPlatform}
)
# The keys are torch's names for kinds of devices.
PLATFORMS: Final[Registry[type[Platform]]] = Registry("kind of device", "forkpoint.platforms", OWN)


def num_devices() -> dict[str, int]:
    """Return the number of devices of each kind, in the order in which `auto` prefers them: plug-ins first."""
    names = [name for name in PLATFORMS.names() if name not in OWN] + list(OWN)
    return {name: PLATFORMS.find(name).num_devices() for name in names}


def resolve_platform(name: str, rank: int = 0, num_ranks: int = 1) -> Platform:
    """Open the device of a name: a kind with an optional `:index` (default: `rank`), or `auto`, the first kind present.

    Ranks share a device where the kind allows that. Raises ConfigError for an unknown kind, an absent device, and fewer
    devices than ranks.
    """
    if name == AUTO:
        name = next(kind for kind, count in num_devices().items() if count)
    head, _, tail = name.rpartition(":")
    kind, index = name, rank
    if head and tail.isdigit():
        kind, index = head, int(tail)
    platform = PLATFORMS.find(kind)
    count = platform.num_devices()
    if num_ranks > 1 and count:
        if not platform.collectives:
            raise ConfigError(f"tensor_parallel_size={num_ranks} is not possible on devices of the kind {kind!r}")
        if platform.serves_all_ranks:
            index = 0 if kind == name else index
        elif kind != name or count < num_ranks:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks} needs as many devices, one for each rank; device={name!r} has "
                f"{count if kind == name else 1}"
            )
    if index >= count:
        why = "" if count else f"; {platform.absence()}"
        raise ConfigError(f"device {name!r} is not here: {count} devices of the kind {kind!r} were found{why}")
    return platform(index)


@functools.cache
def traits_of(device: torch.device) -> DeviceTraits:
    """Return the traits of any device; the defaults for a kind that is not in the table."""
    if device.type not in PLATFORMS.names():
        return DeviceTraits()
    return PLATFORMS.find(device.type).traits(device)

"""What the runtime asks of a device. `table.py` has the kinds of devices there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.config import SchedulerConfig
from forkpoint.platforms.packing import Arrays, Tensors, places_of, views


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What kernels ask of a device before they are launched."""

    num_processors: int = 8  # that run programs at the same time
    num_decode_programs: int = 256  # over (part of a row's keys, key head) that keep it busy
    overlaps_launches: bool = False  # a launch may start while the one before ends
    has_fp8: bool = True  # kernels convert to and from float8_e4m3fn; elsewhere weights come as its bytes
    multiplies_fp8: bool = False  # the library, in blocks; and e4m3 widens faster by its bits (PTX)
    multiplies_tf32: bool = True  # products of fp32 take the first 11 bits, or all by three of them
    has_warpgroups: bool = False  # and loads of tiles that are described, as kernels in Gluon ask of a Hopper GPU
    caps_registers: bool = False  # a launch may say how many registers a thread has at most
    reaches_peers: bool = False  # kernels write to the memory of all devices of the kind here
    kernel_block_sizes: tuple[int, ...] = ()  # tokens; the first that divides a block is what attention reads at a time
    state_write_interval: int = 1  # where the user says nothing
    small_tiles: bool = False  # what a program holds must fit in 192 KiB; else the compiler sees to it
    most_programs: int | None = None  # of a launch
    most_rows: int | None = None  # of a step; with so many, launches keep to that
    masks_gathers: bool = True  # a load keeps its mask where the rows that it takes are no straight line


class Mark(Protocol):
    """A point in the order of work issued to the device."""

    def synchronize(self) -> None:
        """Return once all work issued before the mark is done."""


class _PastMark:
    """Of work that is done when the call which issues it returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Platform(Protocol):
    """One device. Work runs in the order in which it is issued.

    Methods that a kind of device leaves as they are do what holds on a host: work is done when the call that issues it
    returns, and the device's memory is the host's.
    """

    defaults: ClassVar[SchedulerConfig]  # where the user says nothing
    collectives: ClassVar[str] = ""  # torch.distributed's backend for ranks on devices of this kind; "": there is none
    serves_all_ranks: ClassVar[bool] = False  # one device is enough for any number of ranks
    device: torch.device
    shares_memory: bool = True  # the device works on the host's memory: uploads are the arrays themselves
    has_graphs: bool = False  # `record_graph` is of use

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device of that number."""

    @classmethod
    @abstractmethod
    def num_devices(cls) -> int:
        """How many are here."""

    @classmethod
    def absence(cls) -> str:
        """Where none is here, why, and what would bring one."""
        return ""

    @classmethod
    def traits(cls, device: torch.device) -> DeviceTraits:
        """Of a device of this kind."""
        return DeviceTraits()

    @abstractmethod
    def operators(self, cpu_ops: str) -> str:
        """The name of the operator table (`ops.select`) for this device; `cpu_ops` is what the user wants on a CPU."""

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `run` issues, which must not wait for the device; the answer issues it again.

        `run` must have been called before, so that everything it needs is compiled. Memory that it allocates
        stays with the graph and is shared among graphs: one's results are void once another was issued.
        """
        return run

    def mark(self) -> Mark:
        """After all work issued so far."""
        return _PastMark()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, filled in once a mark made after this call has been waited for."""
        return tensor.clone()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory from which copies to the device are fastest."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device. On a CPU the tensor shares the array's memory."""
        return torch.from_numpy(array)

    def upload_all(self, arrays: Arrays) -> Tensors:
        """Many arrays on the device, in one copy."""
        if self.shares_memory:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, size = places_of(arrays)
        packed = np.empty(size, np.uint8)
        for array, offset in zip(arrays.values(), offsets, strict=True):
            packed[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        return views(self.upload(packed), arrays, offsets)

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that could be allocated now."""

    def arena_bytes(self, utilization: float) -> int | None:
        """What is left for the arena of that share of the device's memory; None where memory is shared with others."""
        return None

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """What `run` needed of the device's memory at most, 0 where that is not counted; all that it did not keep is
        given back."""
        run()
        return 0

    def release_unused(self) -> None:
        """Give memory that is kept for later use back to the device."""
        return

    def synchronize(self) -> None:
        """Wait for all work issued to the device."""
        return

"""The interface between the runtime and a device. `table.py` lists the kinds of devices."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.config import SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.platforms.packing import Arrays, Tensors, places_of, views


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """The properties of a device that decide how kernels are launched."""

    num_processors: int = 8  # that run programs at the same time
    num_decode_programs: int = 256  # that keep it busy; each takes a part of a row's keys of one key head
    most_overlapped_rows: int = 0  # steps of up to so many rows start launches while the ones before end
    has_fp8: bool = True  # whether kernels convert float8_e4m3fn; otherwise FP8 weights are bytes
    multiplies_fp8: bool = False  # whether the library multiplies FP8 by FP8, and PTX widens e4m3 by moving bits
    multiplies_tf32: bool = True  # whether fp32 products can use TF32, or three of them for full precision
    has_warpgroups: bool = False  # kernels in Gluon run, with warp groups and tensor descriptors (Hopper)
    caps_registers: bool = False  # a launch may say how many registers a thread has at most
    reaches_peers: bool = False  # its kernels can write to the memory of all devices of this kind
    kernel_block_sizes: tuple[int, ...] = ()  # tokens; the first that divides a block is what attention reads at a time
    state_write_interval: int = 1  # where the user says nothing
    small_tiles: bool = False  # the tiles of a program must fit in 192 KiB, which its compiler does not see to
    most_programs: int | None = None  # of a launch
    most_rows: int | None = None  # of a batch: with more rows, launches could exceed `most_programs`
    masks_gathers: bool = True  # masks of loads that gather scattered rows are obeyed


EVENT_POLL_S: Final = 0.0002  # between two looks at an event that a thread waits for


class DeviceEvent(Protocol):
    """A point in the order of work issued to the device."""

    def synchronize(self) -> None:
        """Wait until all work issued before the event is done."""

    def query(self) -> bool:
        """Return whether all work issued before the event is done."""


class _PastEvent:
    """An event on a device whose work is done when the issuing call returns, so that nothing waits for it."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True


class CopyStream(Protocol):
    """Copies between the device and pinned memory of the host, one after the other, beside the device's other work."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the device for a copy on this stream. Raises torch.OutOfMemoryError."""

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Issue copies, each given by its target and its source, which have to live until the copies are done."""

    def record_event(self) -> DeviceEvent:
        """Return an event after all copies issued so far."""

    def wait_for(self, event: DeviceEvent) -> None:
        """Start no copy that is issued later before the event is reached."""

    def release(self, buffer: Tensor) -> None:
        """Drop a buffer that the device's other work issued so far still reads."""


class Platform(Protocol):
    """One device. Work runs in the order in which it is issued.

    The default methods suit the host: work is done when the issuing call returns, and the device's memory is the
    host's.
    """

    defaults: ClassVar[SchedulerConfig]  # where the user says nothing
    collectives: ClassVar[str] = ""  # torch.distributed's backend for ranks on devices of this kind; "": there is none
    serves_all_ranks: ClassVar[bool] = False  # one device is enough for any number of ranks
    device: torch.device
    shares_memory: bool = True  # the device works on the host's memory: uploads are the arrays themselves
    has_graphs: bool = False  # `record_graph` is of use
    loads_while_recording: bool = False  # `record_graph` takes work whose kernels have never run
    has_copy_streams: bool = False  # `copy_stream` returns one
    lends_memory: bool = False  # `shared_memory` returns memory that other processes can open

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device with that number, which must exist."""

    @classmethod
    @abstractmethod
    def num_devices(cls) -> int:
        """Return the number of devices of this kind."""

    @classmethod
    def absence(cls) -> str:
        """Return why this kind has no device here, for the end of an error message; "" if there is nothing to say.

        Call it only if `num_devices` is 0: it does not look for devices.
        """
        return ""

    @classmethod
    def traits(cls, device: torch.device) -> DeviceTraits:
        return DeviceTraits()

    @property
    def hardware(self) -> str:
        """The kind of hardware: kernels may round differently on another one."""
        found = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
        if torch.cpu._is_avx512_bf16_supported():  # the capability is AVX512 with and without these two
            found.append("AVX512-BF16")
        if torch.cpu._is_amx_tile_supported():
            found.append("AMX")
        return ", ".join(found)

    @abstractmethod
    def operators(self, cpu_ops: str) -> str:
        """Return the name of the operator table (`ops.select`) for this device.

        `cpu_ops` is the user's choice: auto, torch, cpp or triton. Raises ConfigError for one that cannot run here.
        """

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `run` issues, which must not wait for the device. Return a function that replays it.

        Without `loads_while_recording`, `run` must have been called before, so that its kernels are loaded. The memory
        it allocates belongs to the graphs and is shared among them: a graph's results are invalid after another graph
        was replayed.
        """
        return run

    def record_event(self) -> DeviceEvent:
        """Return an event after all work issued so far."""
        return _PastEvent()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host. It is complete after waiting for an event created after this call."""
        return tensor.clone()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised host memory from which copies to the device are fastest."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return the array on the device. On a CPU the tensor shares the array's memory."""
        return torch.from_numpy(array)

    def upload_all(self, arrays: Arrays) -> Tensors:
        """Copy many arrays to the device in one transfer; on a CPU they share the arrays' memory."""
        if self.shares_memory:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, size = places_of(arrays)
        packed = np.empty(size, np.uint8)
        for name, array in arrays.items():
            offset = offsets[name]
            packed[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        return views(self.upload(packed), arrays, offsets)

    def copy_stream(self) -> CopyStream:
        """Return a new stream for copies. Raises ConfigError where `has_copy_streams` is not set."""
        raise ConfigError(f"{self.device} has no streams for copies")

    def pin(self, memory: Tensor) -> None:
        """Pin memory of the host, so that copies run beside the device's other work. Raises RuntimeError.

        The memory starts at a multiple of the size of the host's pages.
        """
        return

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin` for memory that starts at the same address."""
        return

    def shared_memory(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return new memory of the device, and a handle with which other processes of this machine can open it.

        Raises OSError where the device has no such memory, or no room for it.
        """
        raise OSError(f"processes cannot share memory of {self.device}")

    def free_shared_memory(self, memory: Tensor) -> None:
        """Free memory that `shared_memory` returned."""
        return

    def open_shared_memory(self, handle: bytes, num_bytes: int) -> Tensor:
        """Return the memory of another process, which has so many bytes. Raises OSError if it cannot be read here."""
        raise OSError(f"processes cannot share memory of {self.device}")

    def close_shared_memory(self, memory: Tensor) -> None:
        """Close memory that `open_shared_memory` returned. Nothing may use it any more."""
        return

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes of device memory that can be allocated now. Cached memory is returned first."""

    def arena_bytes(self, utilization: float) -> int | None:
        """Return what the share `utilization` of the device's memory leaves for the arena; None if memory is shared."""
        return None

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Call `run` and return the most bytes of device memory it added; 0 where that is not counted.

        Waits for its work and returns cached memory to the device.
        """
        run()
        return 0

    def release_unused(self) -> None:
        """Return cached memory to the device. Call it after recorded graphs were deleted: the next get a new pool."""
        return

    def synchronize(self) -> None:
        """Wait for all work issued to the device."""
        return

"""Memory of an NVIDIA GPU that other processes of the machine can open, through the CUDA runtime that torch has loaded.

torch's allocator cannot provide it: it may map its segments piece by piece, and such memory has no handle.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

HANDLE_BYTES: Final = 64
ENABLE_PEERS: Final = 1  # the only flag of cudaIpcOpenMemHandle: it lets a GPU reach the memory of another one


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class _Bytes:
    """Describes memory of the device to torch. A tensor of it does not free the memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        shape = (num_bytes,)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceMemory:
    """Allocates such memory and opens that of other processes. Methods raise OSError."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._runtime = device, _loaded("libcudart.so")
        self._driver = _loaded("libcuda.so")
        self._runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]

    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return new memory and its handle."""
        address, handle = ctypes.c_void_p(), _Handle()
        self._run("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        try:
            self._run("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        except OSError:
            self._run("cudaFree", address)
            raise
        return self._tensor(address, num_bytes), bytes(handle.bytes)

    def free(self, memory: Tensor) -> None:
        """Free memory that `allocate` returned. Processes that have it open keep it."""
        self._run("cudaFree", ctypes.c_void_p(memory.data_ptr()))

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """Return the memory of a handle of another process, which must have at least `num_bytes`."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(errno.EINVAL, f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        self._run("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), ENABLE_PEERS)
        try:
            self._check(address, num_bytes)
            return self._tensor(address, num_bytes)
        except BaseException:
            self._run("cudaIpcCloseMemHandle", address)
            raise

    def _check(self, address: ctypes.c_void_p, num_bytes: int) -> None:
        """Raise OSError unless there are `num_bytes` at an address, and a tensor of this device can be there."""
        size = ctypes.c_size_t()
        if self._driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), address) or size.value < num_bytes:
            raise OSError(errno.EINVAL, f"the memory has {size.value} bytes, not {num_bytes}")
        try:
            is_there = self._tensor(address, 1).data_ptr() == address.value
        except RuntimeError as error:
            raise OSError(errno.EINVAL, f"torch cannot use the memory: {error}") from error
        if not is_there:  # torch has copied it, and would not see what is written there later
            raise OSError(errno.EXDEV, f"torch finds the memory on another device than {self._device}")

    def close(self, memory: Tensor) -> None:
        """Close memory that `open` returned. Nothing may use it any more."""
        self._run("cudaIpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))

    def _tensor(self, address: ctypes.c_void_p, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Bytes(address.value or 0, num_bytes), device=self._device)

    def _run(self, name: str, *arguments: Any) -> None:
        torch.cuda.set_device(self._device)  # of the calling thread
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()  # so that torch does not find this error at its next call
            raise OSError(errno.EIO, f"{name}: CUDA error {code}")


def _loaded(name: str) -> ctypes.CDLL:
    """Return a library that this process has loaded. Raises OSError."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]  # after the address, the rights, the offset, the device and the inode
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(path)
    raise OSError(errno.ENOENT, f"{name} is not loaded")

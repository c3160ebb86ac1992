"""A GPU that torch calls `cuda`: NVIDIA's, or AMD's with a torch build for it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from forkpoint.platforms.accelerator import AcceleratorPlatform
from forkpoint.platforms.copy_stream import DeviceCopyStream
from forkpoint.platforms.device_memory import DeviceMemory
from forkpoint.platforms.platform import CopyStream, DeviceTraits


class CudaPlatform(AcceleratorPlatform):
    """One CUDA or ROCm device."""

    kind, graph_class, allocator_variable = "cuda", "CUDAGraph", "PYTORCH_CUDA_ALLOC_CONF"
    collectives = "nccl"
    has_copy_streams = True
    lends_memory = torch.version.cuda is not None

    def __init__(self, index: int = 0) -> None:
        # With a workspace, cuBLASLt chooses kernels for 512 rows and more that first clear a counter. It reads this
        # once.
        if torch.version.cuda is not None:
            os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
            self.loads_while_recording = True
        super().__init__(index)

    @classmethod
    def num_devices(cls) -> int:
        return torch.cuda.device_count()

    @classmethod
    def absence(cls) -> str:
        return "torch finds no GPU, or was built without support for one"

    @classmethod
    def traits(cls, device: torch.device) -> DeviceTraits:
        is_nvidia = torch.version.cuda is not None
        capability = torch.cuda.get_device_capability(device)
        own = device.index or 0
        others = (other for other in range(torch.cuda.device_count()) if other != own)
        return DeviceTraits(
            num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
            most_overlapped_rows=512 if is_nvidia and capability >= (9, 0) else 0,
            has_fp8=is_nvidia and capability >= (8, 9),
            multiplies_fp8=is_nvidia and capability == (9, 0),
            multiplies_tf32=is_nvidia and capability >= (8, 0),
            has_warpgroups=is_nvidia and capability == (9, 0),
            caps_registers=is_nvidia,
            reaches_peers=is_nvidia and all(torch.cuda.can_device_access_peer(own, other) for other in others),
            state_write_interval=8,
        )

    def copy_stream(self) -> CopyStream:
        return DeviceCopyStream(self._torch, self.device)

    def pin(self, memory: Tensor) -> None:
        self._torch.set_device(self.device)  # of the calling thread
        code = self._torch.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        self._torch.check_error(int(code))

    def unpin(self, memory: Tensor) -> None:
        self._torch.cudart().cudaHostUnregister(memory.data_ptr())

    def shared_memory(self, num_bytes: int) -> tuple[Tensor, bytes]:
        return self._device_memory().allocate(num_bytes)

    def free_shared_memory(self, memory: Tensor) -> None:
        self._device_memory().free(memory)

    def open_shared_memory(self, handle: bytes, num_bytes: int) -> Tensor:
        return self._device_memory().open(handle, num_bytes)

    def close_shared_memory(self, memory: Tensor) -> None:
        self._device_memory().close(memory)

    def _device_memory(self) -> DeviceMemory:
        if not self.lends_memory:
            raise OSError("processes cannot share memory of this kind of GPU")
        return DeviceMemory(self.device)

    def operators(self, cpu_ops: str) -> str:
        return "triton"

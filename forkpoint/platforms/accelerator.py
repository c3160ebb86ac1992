"""A device with its own memory, driven by a torch module with the interface of `torch.cuda`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from forkpoint.config import SchedulerConfig
from forkpoint.platforms.platform import DeviceEvent, Platform


class AcceleratorPlatform(Platform):
    """One device of a kind. `kind` is also the name of its torch module."""

    defaults: ClassVar = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256, async_scheduling=True)
    shares_memory = False
    has_graphs = True
    kind: ClassVar[str]
    graph_class: ClassVar[str]
    allocator_variable: ClassVar[str]  # read at the first use of the device's memory

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device(self.kind, index)
        # Without it, fragments left by loading can hold an eighth of the memory.
        os.environ.setdefault(self.allocator_variable, "expandable_segments:True")
        self._torch: Any = torch.get_device_module(self.device)
        self._torch.set_device(self.device)
        self._pool: Any = None  # the memory pool that graphs share

    @property
    def hardware(self) -> str:
        return str(self._torch.get_device_name(self.device))

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = self._torch.graph_pool_handle()
        graph = getattr(self._torch, self.graph_class)()
        mode = "relaxed" if self.loads_while_recording else "thread_local"
        with self._torch.graph(graph, pool=self._pool, capture_error_mode=mode):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def record_event(self) -> DeviceEvent:
        event: Any = self._torch.Event()
        event.record()
        recorded: DeviceEvent = event
        return recorded

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.host_buffer(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        source = torch.from_numpy(array)
        staged = self.host_buffer(tuple(source.shape), source.dtype).copy_(source)
        # The host allocator does not reuse the staged memory before the copy is done.
        return staged.to(self.device, non_blocking=True)

    def free_bytes(self) -> int:
        self._torch.empty_cache()  # return cached memory to the device
        return int(self._torch.mem_get_info(self.device)[0])

    def arena_bytes(self, utilization: float) -> int | None:
        """Return the share `utilization` of the device's memory, less what all programs hold now; at least 0."""
        total = int(self._torch.mem_get_info(self.device)[1])
        return max(0, int(total * utilization) - (total - self.free_bytes()))

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self._torch.empty_cache()
        before = self._torch.memory_reserved(self.device)
        self._torch.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        peak = self._torch.max_memory_reserved(self.device)
        self._torch.empty_cache()
        return int(peak - before)

    def release_unused(self) -> None:
        self._torch.empty_cache()
        self._pool = None  # the pool of deleted graphs cannot be reused

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

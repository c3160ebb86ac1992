"""A stream of a device on which copies to and from pinned memory of the host run beside other work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.platforms.platform import DeviceEvent

# Bytes of one copy. The device's copy engine serves other copies in between, such as those of a step's inputs: 8 MiB
# take 160 us over PCIe 5. The host's addresses that are multiples of it separate pieces that were pinned apart.
PIECE_BYTES: Final = 1 << 23


class DeviceCopyStream:
    """Implements `platform.CopyStream` with a torch module that has the interface of `torch.cuda`."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream: Any = module.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        with self._module.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for target, source in copies:
            host = next((each for each in (target, source) if each.device.type == "cpu"), None)
            if host is None:  # no inputs of a step travel between devices
                targets.append(target)
                sources.append(source)
                continue
            for start, end in pieces(host.data_ptr(), host.numel()):
                is_whole = end - start == host.numel()
                targets.append(target if is_whole else target[start:end])
                sources.append(source if is_whole else source[start:end])
        with self._module.stream(self._stream):
            copy_all(targets, sources)

    def record_event(self) -> DeviceEvent:
        event: Any = self._module.Event()
        event.record(self._stream)
        recorded: DeviceEvent = event
        return recorded

    def wait_for(self, event: DeviceEvent) -> None:
        self._stream.wait_event(event)

    def release(self, buffer: Tensor) -> None:
        if buffer.device.type != "cpu":
            buffer.record_stream(self._module.current_stream(self._device))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in the order of the current stream's work.

    A device may make the copies of a call in any order, so that its memory may not be in two of them. One call of torch
    takes less of the host's time than a call for each copy.
    """
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def pieces(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of addresses, by their offset in it, that multiples of PIECE_BYTES separate."""
    start = 0
    while start < num_bytes:
        end = min(num_bytes, start + PIECE_BYTES - (address + start) % PIECE_BYTES)
        yield start, end
        start = end

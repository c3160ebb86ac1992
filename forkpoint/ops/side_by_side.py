"""Two parts of a layer that do not depend on each other: its decode rows, and its prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from forkpoint.platforms.table import traits_of

Part: TypeAlias = Callable[[], object]  # issues work on a device
SideBySide: TypeAlias = Callable[[torch.device, Part, Part], None]


def one_after_other(device: torch.device, beside: Part, part: Part) -> None:
    """Issue both parts on the current stream."""
    beside()
    part()


class SideStream:
    """Issues one part on a stream of its own and the other on the current stream, which then waits for both.

    Short prompts leave most of the device idle, and decode rows wait for its memory. What the part on the side
    allocates comes from memory that only this stream uses, so it should be the one that needs less. On devices whose
    launches do not overlap, one part is issued after the other.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def __call__(self, device: torch.device, beside: Part, part: Part) -> None:
        if not traits_of(device).most_overlapped_rows:
            return one_after_other(device, beside, part)
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        side, current = self._streams[device], module.current_stream(device)
        side.wait_stream(current)
        try:
            with module.stream(side):
                beside()
            part()
        finally:  # a graph cannot end while a stream has not joined
            current.wait_stream(side)

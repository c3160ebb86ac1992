"""A CPU with streams for copies that run late, in any order that the events allow, and in two halves."""

from __future__ import annotations

import random
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.platform import CopyStream, DeviceEvent

POISON = 0xA5


class LateEvent:
    """A point of a stream. A look at it lets some streams go on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_reached = False

    def query(self) -> bool:
        self._world.go_on()
        return self.is_reached

    def synchronize(self) -> None:
        self._world.finish()


class ComputeEvent:
    """A point in the order of the CPU's own work, which is always done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class World:
    """All streams, whose work is done only when somebody looks at an event, and not always then."""

    def __init__(self, seed: int, chance: float) -> None:
        self.random = random.Random(seed)
        self.chance = chance  # that a look at an event lets a stream do one more thing
        self.streams: list[LateStream] = []
        self.newest_compute = threading.local()  # `event`, of each rank
        self.has_memory = True
        self.lock = threading.RLock()  # ranks are threads

    def go_on(self) -> None:
        with self.lock:
            while self.random.random() < self.chance and self._do_one():
                pass

    def finish(self) -> None:
        with self.lock:
            while self._do_one():
                pass
            assert not any(stream.work for stream in self.streams), "streams wait for each other"

    def _do_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        if not ready:
            return False
        self.random.choice(ready).work.popleft()[1]()
        return True


class LateStream:
    """Implements `platform.CopyStream`. Its work is a list of (whether it may begin, what it does)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.work: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()
        self._buffers: set[int] = set()  # addresses
        self._waited_for: DeviceEvent | None = None
        world.streams.append(self)

    def buffer(self, num_bytes: int) -> Tensor:
        if not self._world.has_memory:
            raise torch.OutOfMemoryError("no memory is left for a buffer")
        buffer = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self._buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._world.lock:
            targets = {target.untyped_storage().data_ptr() for target, _ in copies}
            if not targets <= self._buffers:  # they are in the host, and the CPU has filled the buffers
                assert self._waited_for is self._world.newest_compute.event, "the copy does not wait for the step"
            for target, source in copies:
                to, of = weakref.ref(target), weakref.ref(source)
                self.work.append((_at_once, lambda to=to: _living(to).fill_(POISON)))
                self.work.append((_at_once, lambda to=to, of=of: _living(to).copy_(_living(of))))

    def record_event(self) -> DeviceEvent:
        event = LateEvent(self._world)
        with self._world.lock:
            self.work.append((_at_once, lambda: setattr(event, "is_reached", True)))
        return event

    def wait_for(self, event: DeviceEvent) -> None:
        if isinstance(event, LateEvent):
            with self._world.lock:
                self.work.append((lambda: event.is_reached, lambda: None))
        else:
            self._waited_for = event

    def release(self, buffer: Tensor) -> None:
        buffer.fill_(POISON)


def _at_once() -> bool:
    return True


def _living(tensor: weakref.ref[Tensor]) -> Tensor:
    found = tensor()
    assert found is not None, "the memory of a copy was dropped before its event"
    return found


class LatePlatform(CpuPlatform):
    """A CPU whose host tier streams. `chance` says how far its streams come between two steps."""

    has_copy_streams = True
    lends_memory = True
    shared: ClassVar[dict[bytes, Tensor]] = {}  # memory by its handle, of all these devices

    def __init__(self, seed: int, chance: float = 0.5) -> None:
        super().__init__()
        self.world = World(seed, chance)
        self.num_opened = 0  # how much memory of others is open

    def shared_memory(self, num_bytes: int) -> tuple[Tensor, bytes]:
        memory, handle = torch.full((num_bytes,), POISON, dtype=torch.uint8), uuid.uuid4().bytes
        self.shared[handle] = memory
        return memory, handle

    def free_shared_memory(self, memory: Tensor) -> None:
        [handle] = [handle for handle, each in self.shared.items() if each is memory]
        self.shared.pop(handle).fill_(POISON)

    def open_shared_memory(self, handle: bytes, num_bytes: int) -> Tensor:
        if handle not in self.shared or len(self.shared[handle]) < num_bytes:
            raise OSError("there is no such memory")
        self.num_opened += 1
        return self.shared[handle]

    def close_shared_memory(self, memory: Tensor) -> None:
        self.num_opened -= 1

    def copy_stream(self) -> CopyStream:
        return LateStream(self.world)

    def record_event(self) -> DeviceEvent:
        event = ComputeEvent()
        self.world.newest_compute.event = event
        return event

    def synchronize(self) -> None:
        self.world.finish()
